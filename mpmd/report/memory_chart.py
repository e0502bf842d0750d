"""The memory of a device over a step as a picture: kinds on top of each other, with axes."""

import math
from collections.abc import Mapping, Sequence

from mpmd.report.memory import KINDS
from scheduler.base.texts import in_bytes


def round_ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`, about so many.

    Examples:
      >>> round_ticks(64.8, 10), round_ticks(4.47, 4)
      ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [0.0, 2.0, 4.0])
    """
    power = 10.0 ** math.floor(math.log10(most / count))
    every = next(power * k for k in (1, 2, 5, 10) if most / (power * k) <= count)
    return [every * k for k in range(int(most / every) + 1)]


def memory_chart(history: Sequence[Mapping[str, int]], most: float, title: str) -> str:
    """A figure. The horizontal axis counts instructions.

    Args:
      history: bytes by kind, after each instruction.
      most: bytes at the upper end of the vertical axis.
    """
    count = max(1, len(history))
    down = [(100 - 100 * y / most, in_bytes(y) if y else "0") for y in round_ticks(most, 4)]
    along = [(100 * x / count, f"{x:.0f}") for x in round_ticks(count, 6) if x == int(x)]
    lines = "".join(f'<line x1="0" x2="{count}" y1="{y:.2f}" y2="{y:.2f}"/>' for y, _ in down)
    return (
        f'<figure class="curve"><figcaption>{title}</figcaption><div class="up">'
        + "".join(f'<span style="top:{y:.2f}%">{text}</span>' for y, text in down)
        + f'</div><svg viewBox="0 0 {count} 100" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'{_areas(history, most)}<g class="grid">{lines}</g></svg><div class="along">'
        + "".join(f'<span style="left:{x:.2f}%">{text}</span>' for x, text in along)
        + "</div></figure>"
    )


def _areas(history: Sequence[Mapping[str, int]], most: float) -> str:
    below = [0.0] * len(history)
    shapes = []
    for kind in KINDS:
        above = [b + now.get(kind, 0) for b, now in zip(below, history, strict=True)]
        if above != below:
            top = [f"{x},{_down(v, most)} {x + 1},{_down(v, most)}" for x, v in enumerate(above)]
            under = [f"{x + 1},{_down(v, most)} {x},{_down(v, most)}" for x, v in enumerate(below)]
            points = " ".join([*top, *reversed(under)])
            shapes.append(f'<polygon points="{points}" fill="var(--{kind})"><title>{kind}</title></polygon>')
        below = above
    return "".join(shapes)


def _down(nbytes: float, most: float) -> str:
    return f"{100 - 100 * nbytes / most:.2f}"
