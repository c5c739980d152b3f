"""What made the numbers in docs/results.md. Each command runs as `python -m bench.NAME`.

    throughput   tokens per second of generation, equality with plain decoding, peers
    rollout      long tails, accept lengths
    round        the parts of one round
    control      controllers against static strategies; predict and replay: on other chips
    train        RL runs compared step by step
    serve        the server under load, and against the batch API
    gpu          what is to be known of an H100 or H200, in parts of three minutes

record.py writes result files and has timing in turns and ratios with intervals, command.py what
command lines share, plots.py the pictures. results_page.py makes docs/results.md of bench/results.
"""
