"""The commands that made the numbers in docs/results.md, each run as `python -m bench.NAME`.

    decode       tokens per second of generation, equality with plain decoding
    longtail     a rollout whose samples have very different lengths
    peers        specjax beside transformers and a plain sampler in jax
    rl           RL runs, or trainings of draft heads, compared step by step
    serve        the server under the load of guidellm
    gpu          attention, steps, rounds and training on an H100 or H200, in parts of minutes
    compiled     rounds and updates by XLA's compilers for TPUs and GPUs, without the chip

record.py writes result files and has timing in turns and ratios with intervals, command.py has the
arguments that command lines share, plots.py draws the pictures, programs.py builds engines and
programs to compile. results_page.py makes docs/results.md of bench/results.
"""
