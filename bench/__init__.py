"""The commands that made the numbers in docs/results.md, each run as `python -m bench.NAME`.

    throughput   tokens per second of generation, equality with plain decoding, peers
    rollout      long tails, accept lengths
    round        the parts of one round
    control      controllers against static strategies; predict and replay: on other chips
    train        RL runs compared step by step
    serve        the server under load, and against the batch API
    gpu          attention, steps, rounds and training on an H100 or H200, in parts of minutes

record.py writes result files and has timing in turns and ratios with intervals, command.py has the
arguments that command lines share, plots.py draws the pictures. results_page.py makes
docs/results.md of bench/results.
"""
