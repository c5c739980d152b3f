"""`python -m bench.control plot FILE`: draws a result file of `sweep` or `swap` again, as a PNG."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from bench.command import user_errors  # noqa: E402
from bench.control import choices  # noqa: E402
from specjax.command_line import ArgumentParser  # noqa: E402
from specjax.control import OFF  # noqa: E402

CONTROLLERS = {
    "goodput": ("#c8102e", "o", "-"),
    "bandit": ("#2a8c4a", "s", "--"),
    "ema": ("#7a3fb0", "^", ":"),
    "static": ("#777777", "", "-"),
}
ORACLE = "#f2c14e"
BAD = "#f4e3e1"
TOLD = {
    "announced": "the controller is told of new weights",
    "unannounced": "the controller is not told of new weights",
}
EVENTS = {
    "start": "start",
    "swapped_for_a_bad_one": "bad head",
    "swapped_back": "good head again",
}


def draw(path: str | Path) -> Path:
    """Draws a result file of `bench.control` as a PNG of the same name beside it.

    Raises:
      ValueError: it is a result of something else.
    """
    path = Path(path)
    result = json.loads(path.read_text(encoding="utf-8"))
    name = result["name"]
    if not name.startswith("control_"):
        raise ValueError(f"{path} is a result of {name!r}; give one of bench.control")
    drawn = draw_swap if name.startswith("control_swap_") else draw_sweep
    figure = drawn(result["figures"], result["settings"])
    machine = result["machine"]
    where = machine["processor"] if machine["platform"] == "cpu" else machine["device"]
    policy = name.removeprefix("control_").removeprefix("swap_")
    figure.suptitle(f"{figure.get_suptitle()}: policy {policy}, on {where}", fontsize=13,
                    weight="bold", x=0.01, ha="left")  # fmt: skip
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=100)
    plt.close(figure)
    return out


# --- batch sizes -----------------------------------------------------------------------------


def draw_sweep(figures: Mapping[str, Mapping], settings: Mapping):
    """Tokens per second, controllers over the best strategy, and the useless head."""
    useless = _series(figures, r"useless_head/batch_(\d+)/goodput_over_plain")
    widths = [1.5, 1.15] + [0.85] * bool(useless)
    figure, axes = plt.subplots(
        1, len(widths), figsize=(5 * sum(widths), 6.2), width_ratios=widths, layout="constrained"
    )
    figure.suptitle("Strategies and controllers at each batch size")
    rates(axes[0], figures)
    ratios(axes[1], figures)
    if useless:
        batch_axis(axes[2], useless)
        off = _series(figures, r"useless_head/batch_(\d+)/off_over_plain")
        axes[2].plot(list(off), [e["value"] for e in off.values()], color="black", linewidth=1.6,
                     marker=".", label="off in the same engine")  # fmt: skip
        _points(axes[2], useless, "goodput", "goodput", shift=0)
        _threshold(axes[2])
        axes[2].set_title("Useless head: goodput /\nan engine that cannot speculate", loc="left",
                          fontsize=11)  # fmt: skip
        axes[2].legend(frameon=False, fontsize=9, loc="lower left")
        _room(axes[2], useless)
    note = (
        f"Medians of {settings['repeats']} alternating measurements; bars: 95% bootstrap intervals "
        "of the medians (left) and of ratios turn by turn. The clock covers decoding and reading "
        "prompts,\nnot compiling and calibrating. Oracle: the strategy with the best median at "
        "each batch size."
    )
    figure.supxlabel(note, fontsize=8.5, color="#555555", x=0.01, ha="left")
    return figure


def rates(axis: Axes, figures: Mapping[str, Mapping]) -> None:
    """Tokens per second against batch size."""
    oracle = _series(figures, r"oracle/batch_(\d+)")
    batch_axis(axis, oracle)
    axis.plot(list(oracle), [e["value"] for e in oracle.values()], color=ORACLE, linewidth=11,
              alpha=0.55, solid_capstyle="round", label="oracle", zorder=1)  # fmt: skip
    names = _names(figures, r"tokens_per_sec/batch_\d+/strategy/(.*)")
    for name, color in zip(names, strategy_colors(names), strict=True):
        found = _series(figures, rf"tokens_per_sec/batch_(\d+)/strategy/{re.escape(name)}")
        axis.plot(list(found), [e["value"] for e in found.values()], color=color, linewidth=1.6,
                  marker=".", label="off (plain)" if name == OFF else name, zorder=2)  # fmt: skip
    kinds = _names(figures, r"tokens_per_sec/batch_\d+/controller/(.*)")
    for at, kind in enumerate(kinds):
        found = _series(figures, rf"tokens_per_sec/batch_(\d+)/controller/{kind}")
        _points(axis, found, kind, kind, shift=at - (len(kinds) - 1) / 2)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("tokens per second")
    axis.set_title("Tokens per second", loc="left", fontsize=11)
    axis.legend(frameon=False, fontsize=9, ncols=3, loc="lower right")


def ratios(axis: Axes, figures: Mapping[str, Mapping]) -> None:
    """Controllers, and plain decoding, over the best strategy."""
    oracle = _series(figures, r"oracle/batch_(\d+)")
    batch_axis(axis, oracle)
    off = _series(figures, rf"tokens_per_sec/batch_(\d+)/strategy/{OFF}")
    shares = [off[slots]["value"] / oracle[slots]["value"] for slots in off]
    axis.plot(list(off), shares, color="black", linewidth=1.6, marker=".", label="off (plain)")
    axis.axhline(1, color=ORACLE, linewidth=6, alpha=0.55, zorder=1)
    kinds = _names(figures, r"over_best/batch_\d+/(.*)")
    for at, kind in enumerate(kinds):
        found = _series(figures, rf"over_best/batch_(\d+)/{kind}")
        _points(axis, found, kind, kind, shift=at - (len(kinds) - 1) / 2)
    _threshold(axis)
    axis.set_title("Over the best strategy at that batch size", loc="left", fontsize=11)
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="lower right")


def batch_axis(axis: Axes, found: Mapping[int, Mapping]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(found), [str(slots) for slots in found])
    axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_xlim(min(found) / 1.25, max(found) * 1.25)
    axis.set_xlabel("samples that run at once")
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def strategy_colors(names: Sequence[str]) -> list:
    """Black for plain decoding, darker blues for what drafts more."""
    drafting = [name for name in names if name != OFF]
    shades = dict(zip(drafting, plt.cm.Blues(np.linspace(0.35, 0.95, len(drafting))), strict=True))
    return [shades.get(name, "black") for name in names]


def _points(axis: Axes, found: Mapping[int, Mapping], kind: str, label: str, shift: float) -> None:
    """A controller's line with its intervals, a little aside so that they do not overlap."""
    color, marker, style = CONTROLLERS[kind]
    xs = np.array(list(found)) * 2 ** (0.09 * shift)
    values = np.array([entry["value"] for entry in found.values()])
    low, high = np.array([entry["interval"] for entry in found.values()]).T
    axis.errorbar(xs, values, yerr=[values - low, high - values], color=color, marker=marker,
                  linestyle=style, linewidth=1.8, elinewidth=1.1, capsize=2.5, markersize=6,
                  label=label, zorder=4 if kind == "goodput" else 3)  # fmt: skip


def _threshold(axis: Axes) -> None:
    axis.axhline(choices.LEAST, color="#c8102e", linewidth=0.9, linestyle=(0, (4, 3)))
    axis.annotate(
        f"{choices.LEAST}", (1.0, choices.LEAST), xycoords=("axes fraction", "data"), fontsize=8,
        color="#c8102e", xytext=(2, 0), textcoords="offset points", va="center",
    )  # fmt: skip


def _room(axis: Axes, found: Mapping[int, Mapping]) -> None:
    """A scale on which small ratios look small."""
    low = min(entry["interval"][0] for entry in found.values())
    high = max(entry["interval"][1] for entry in found.values())
    axis.set_ylim(min(0.85, low - 0.03), max(1.1, high + 0.03))


def _series(figures: Mapping[str, Mapping], pattern: str) -> dict[int, Mapping]:
    """Entries by batch size, in order."""
    found = {int(m[1]): figures[key] for key in figures if (m := re.fullmatch(pattern, key))}
    return dict(sorted(found.items()))


def _names(figures: Mapping[str, Mapping], pattern: str) -> list[str]:
    return list(dict.fromkeys(m[1] for key in figures if (m := re.fullmatch(pattern, key))))


# --- swaps -----------------------------------------------------------------------------------


def draw_swap(figures: Mapping[str, Mapping], settings: Mapping):
    """A line of panels per controller, and the seconds lost below."""
    variants, kinds = settings["variants"], settings["controllers"]
    speeds = {head: speeds_of(figures, head) for head in dict.fromkeys(choices.PHASES)}
    heights = [1.0] * len(kinds) + [1.7]
    figure, axes = plt.subplots(
        len(heights), len(variants), figsize=(7.2 * len(variants), 1.55 * sum(heights) + 1.2),
        height_ratios=heights, sharex="col", sharey="row", squeeze=False, layout="constrained",
    )  # fmt: skip
    figure.suptitle(f"The head swapped for a bad one and back, batch {settings['batch']}")
    for column, variant in zip(axes.T, variants, strict=True):
        for axis, kind in zip(column, kinds, strict=False):
            phases = [phase_of(figures, variant, kind, event) for event in choices.EVENTS]
            choice_lines(axis, kind, phases, speeds)
            lost(column[-1], kind, phases, speeds)
        column[0].annotate(TOLD[variant], (0, 1),
                           xycoords="axes fraction", xytext=(0, 24), fontsize=11, weight="bold",
                           textcoords="offset points")  # fmt: skip
        finish(column[-1], [sum(s.rounds for s in phase) for phase in phases])
    handles = [Patch(color=ORACLE, alpha=0.55, label="oracle"), Patch(color=BAD, label="bad head")]
    axes[-1][0].legend(handles=axes[-1][0].get_legend_handles_labels()[0] + handles, fontsize=9,
                       frameon=False, loc="upper left")  # fmt: skip
    note = (
        f"The first of {settings['runs']} runs. Numbers: rounds until the choices are within "
        f"{choices.TOLERANCE:.0%} of the oracle's goodput and stay there, by the mean tokens and "
        f"seconds per round of each strategy with each head.\nRegret: seconds that the oracle "
        "would have saved for as many tokens."
    )
    figure.supxlabel(note, fontsize=8.5, color="#555555", x=0.01, ha="left")
    return figure


def speeds_of(figures: Mapping[str, Mapping], head: str) -> dict[str, choices.Speed]:
    """Of a result file, by strategy."""
    names = _names(figures, rf"tokens_per_round/{head}_head/(.*)")
    return {
        name: choices.Speed(
            figures[f"tokens_per_round/{head}_head/{name}"]["value"],
            figures[f"seconds_per_round/{head}_head/{name}"]["value"],
        )
        for name in names
    }


def phase_of(figures: Mapping[str, Mapping], variant: str, kind: str, event: str):
    return choices.from_text(figures[f"choices/{variant}/{kind}/{event}"]["value"])


def choice_lines(axis: Axes, kind: str, phases: Sequence[Sequence[choices.Span]], speeds) -> None:
    """Which strategy ran, over rounds, above the one that would have been best."""
    names = list(next(iter(speeds.values())))
    color, begin, xs, ys = CONTROLLERS[kind][0], 0, [], []
    for event, head, spans in zip(EVENTS.values(), choices.PHASES, phases, strict=True):
        by_name, end = speeds[head], begin + sum(s.rounds for s in spans)
        best = max(by_name, key=lambda name, by=by_name: by[name].rate)
        axis.plot([begin, end], [names.index(best)] * 2, color=ORACLE, linewidth=8, alpha=0.55,
                  solid_capstyle="butt")  # fmt: skip
        if head == "bad":
            axis.axvspan(begin, end, color=BAD, zorder=0)
        rounds = choices.recovery(spans, by_name)
        said = "never" if rounds is None else f"{rounds} rounds"
        axis.annotate(f"{event}: {said}", (begin, 1), xycoords=("data", "axes fraction"),
                      xytext=(3, 3), textcoords="offset points", fontsize=8)  # fmt: skip
        at = begin
        for span in spans:
            xs += [at, at + span.rounds]
            ys += [names.index(span.strategy)] * 2
            at += span.rounds
        begin = end
    axis.plot(xs, ys, color=color, linewidth=1.6, solid_joinstyle="miter")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_ylabel(kind, fontsize=11, weight="bold", color=color)
    axis.grid(alpha=0.25, axis="y")
    axis.spines[["top", "right"]].set_visible(False)


def lost(axis: Axes, kind: str, phases: Sequence[Sequence[choices.Span]], speeds) -> None:
    """Seconds lost so far, over rounds."""
    xs, ys = [0], [0.0]
    for head, spans in zip(choices.PHASES, phases, strict=True):
        for span, loss in zip(spans, choices.regrets(spans, speeds[head]), strict=True):
            xs.append(xs[-1] + span.rounds)
            ys.append(ys[-1] + loss)
    color, _, style = CONTROLLERS[kind]
    axis.plot(xs, ys, color=color, linestyle=style, linewidth=1.8, label=f"{kind}: {ys[-1]:.2f} s")


def finish(axis: Axes, lengths: Sequence[int]) -> None:
    axis.axvspan(lengths[0], lengths[0] + lengths[1], color=BAD, zorder=0)
    axis.set_xlabel("rounds")
    axis.set_ylabel("regret, seconds so far")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if not axis.get_subplotspec().is_first_col():
        axis.legend(frameon=False, fontsize=9, loc="upper left")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.control plot", description=__doc__)
    parser.add_argument("file", help="result file of `sweep` or `swap`")
    args = parser.parse_args(argv)
    with user_errors("control plot"):
        print(draw(args.file))
