"""Answers to mathematical questions: finding them in a text, and comparing them.

choice       finds the letter of a multiple-choice answer
extract      finds the final answer in a completion or in a row of data
quantity     reads numbers with units (`$1,250`, `3 1/2`, `40%`, `5 cm`) and compares them
latex        gives LaTeX one spelling and splits it at commas, brackets and relation signs
formulas     parses one formula with math-verify and compares it with sympy
equivalence  decides whether two answers are the same; runs as a child process
"""
