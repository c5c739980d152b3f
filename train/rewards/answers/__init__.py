"""Answers to mathematical questions: finding them in a text, and comparing them.

extract      finds the final answer, or its letter, in a completion or in a row of data
quantity     reads numbers with units (`$1,250`, `3 1/2`, `40%`, `5 cm`) and compares them
latex        gives LaTeX one spelling
equivalence  decides whether two answers are the same, by math-verify; runs as a child process
"""
