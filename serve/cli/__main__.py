"""`python -m serve.cli` is the command `specjax`."""

from specjax import interrupts

if __name__ == "__main__":
    interrupts.begin("specjax")
    from serve.cli.main import main

    interrupts.run(main)
