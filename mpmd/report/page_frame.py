"""The frame of the HTML report, with its style (`page.css`) and its little script (`page.js`)."""

from pathlib import Path

TOOLS = (
    '<div class="tools"><button data-k="-" aria-label="zoom out">−</button><button data-k="+" aria-label="zoom in">+'
    '</button><button data-k="0">all</button><span class="soft">keys: + − 0 to zoom, ← → from one to the next; or ctrl'
    " and the wheel</span></div>"
)


def page(title: str, body: str) -> str:
    """A whole page, which needs no other file."""
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width,initial-scale=1"><title>{title}</title><style>\n{style}</style></head>\n'
        f"<body>{body}<script>\n{script}</script></body></html>\n"
    )
