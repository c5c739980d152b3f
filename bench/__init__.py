"""The commands that made the numbers in docs/results.md, each run as `python -m bench.NAME`.

    decode       tokens per second of generation, equality with plain decoding
    longtail     a rollout whose samples have very different lengths
    peers        specjax beside transformers and a plain sampler in jax
    rl           RL runs, or trainings of draft heads, compared step by step
    quantised    policies in packed number formats, with heads that were aligned or not
    recurrent    rounds of a Gated DeltaNet layer by the TPU compiler
    gpu          attention, steps, rounds and training on an H100 or H200, in parts of minutes

record.py writes result files and has timing in turns and ratios with intervals, command.py has the
arguments that command lines share, plots.py draws the pictures, programs.py builds engines and
programs to compile. results_page.py makes docs/results.md of bench/results.
"""
