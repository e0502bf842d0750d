"""The look of tasks in pictures: one hue a stage, one shade and one pattern a kind."""

import colorsys
from collections.abc import Container

_LIGHTNESS = {"F": 82, "B": 58, "I": 66, "W": 90, "R": 74}
HATCHES = {
    "B": '<path d="M0 0L6 6M6 0L0 6" stroke="#000" stroke-opacity="0.2" stroke-width="0.8"/>',
    "I": '<path d="M0 6L6 0" stroke="#000" stroke-opacity="0.3" stroke-width="1"/>',
    "W": '<circle cx="3" cy="3" r="1" fill="#000" fill-opacity="0.3"/>',
    "R": '<path d="M0 3L6 3" stroke="#000" stroke-opacity="0.3" stroke-width="1"/>',
}


def pattern_definitions(kinds: Container[str]) -> str:
    """Returns the patterns of these kinds, each named by its letter, to be put into an SVG once."""
    made = (
        f'<pattern id="{kind}" width="6" height="6" patternUnits="userSpaceOnUse">{drawing}</pattern>'
        for kind, drawing in HATCHES.items()
        if kind in kinds
    )
    return "\n".join(["<defs>", *made, "</defs>"])


def colour(stage: int, kind: str, num_stages: int) -> str:
    """Returns the colour of a task: one hue a stage, from green over blue to violet; one shade a kind.

    No stage is red, which looks like an error. The colour is hex, because not every viewer reads hsl().
    """
    hue = (95 + 180 * stage / max(num_stages - 1, 1)) / 360
    channels = colorsys.hls_to_rgb(hue, _LIGHTNESS[kind] / 100, 0.75)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
