"""The figures of `bench.start` are those of its runs."""

import pytest

from bench import start


def test_figures_are_ratios_of_neighbours_and_the_least_seconds():
    def run(wall, cpu, compiling=80.0):
        return {"wall": wall, "cpu": cpu, "compiling": compiling, "programs": 30, "threads": 2}

    runs = {
        "alone": [run(100.0, 95.0), run(200.0, 99.0, 85.0), run(110.0, 96.0)],
        "together": [run(60.0, 97.0, 0.0), run(120.0, 99.0, 0.0), run(88.0, 94.0, 0.0)],
    }
    figures = start.figures(runs)
    assert figures["together_to_alone"]["value"] == pytest.approx(0.6)
    assert figures["together_to_alone"]["interval"] == pytest.approx([0.6, 0.8])
    values = {name: figure["value"] for name, figure in figures.items()}
    assert (values["programs"], values["wall_alone"], values["wall_together"]) == (30, 100.0, 60.0)
    assert (values["cpu_alone"], values["cpu_together"]) == (95.0, 94.0)
    assert (values["cpu_compiling"], values["cpu_tracing_and_running"]) == (80.0, 15.0)
