"""The frame of the HTML report: its style and its little script."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--soft:#5c6670;--line:#d9dee3;--row:#f3f5f7;--accent:#2563c9;
--busy:#3f8fb0;--wait:#c9ced4;--move:#e0a03c;--late:#a98bc4;
--parameters:#3b6fb6;--state:#7b61a8;--data:#8a8f98;--gradients:#d9a441;--activations:#3f9b76;--temporaries:#8fc1d4}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e4e8ec;--soft:#9aa5b0;--line:#333a41;--row:#1e2327;
--accent:#7fb0ff;--wait:#444c55}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1500px;padding:1rem 1.25rem 4rem;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.4rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.3rem 0;max-width:75ch}
.soft{color:var(--soft)}a{color:var(--accent)}
.cards{display:flex;flex-wrap:wrap;gap:.6rem;margin:.8rem 0}
.card{border:1px solid var(--line);border-radius:8px;padding:.5rem .8rem;min-width:8rem}
.card b{display:block;font-size:1.2rem}.card span{color:var(--soft);font-size:.85rem}
.verdict{border-left:4px solid var(--accent);background:var(--row);border-radius:0 8px 8px 0;padding:.6rem .9rem;
margin:.8rem 0}.verdict>*{display:block;max-width:110ch}.verdict b{font-size:1.15rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}summary{cursor:pointer}details{margin-top:2rem}
.wide{overflow:auto;max-height:75vh}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
thead th{position:sticky;top:0;background:var(--bg);z-index:1}
th,td{padding:.25rem .7rem .25rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child,td.l,th.l{text-align:left}
.last td:last-child{white-space:normal;text-align:left;min-width:14rem}p.keys{max-width:none}
.chart{border:1px solid var(--line);border-radius:8px;overflow-x:auto;padding:.4rem 0}
.chart:focus{outline:2px solid var(--accent);outline-offset:2px}
.inner{position:relative;min-width:100%;padding-left:72px}
.lane{position:relative;height:26px;margin:3px 0;background:var(--row)}
.lane>.name{position:sticky;left:0;margin-left:-72px;width:66px;display:inline-block;z-index:3;font-size:12px;
line-height:26px;background:var(--bg);padding-left:8px;pointer-events:none;white-space:nowrap;overflow:hidden}
.bar{position:absolute;top:2px;height:22px;overflow:hidden;font-size:11px;line-height:22px;text-align:center;color:#111;
border-left:1px solid #0003;white-space:nowrap;display:flex;flex-wrap:wrap;justify-content:center}
.bar::before{content:"";height:22px}
.clock{position:relative;height:16px;font-size:11px;color:var(--soft);overflow:hidden;white-space:nowrap}
.clock span{position:absolute;border-left:1px solid var(--soft);padding-left:3px;line-height:14px}
.clock .last{transform:translateX(-100%);border:0;border-right:1px solid var(--soft);padding:0 3px 0 0}
.bar.thin{top:auto;bottom:0;height:4px;background:var(--accent);opacity:.75;border:0}
.bar.stuck{top:8px;height:10px;background:var(--move);border:0}.bar.call{background:#b8bec5}
.bar.B{background-image:repeating-linear-gradient(45deg,#0002 0 1px,transparent 1px 6px)}
.bar.I{background-image:repeating-linear-gradient(135deg,#0003 0 1px,transparent 1px 6px)}
.bar.W{background-image:radial-gradient(#0004 1px,transparent 1.3px);background-size:6px 6px}
.bar.on{outline:2px solid var(--fg);outline-offset:-2px;z-index:2}
.tools{display:flex;flex-wrap:wrap;gap:.4rem;align-items:center;margin:.3rem 0}
button{font:inherit;color:var(--fg);background:var(--row);border:1px solid var(--line);border-radius:6px;
padding:.1rem .6rem;cursor:pointer}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .35em 0 0}
.named{white-space:nowrap;margin-right:.6em}
.said{min-height:1.5em;font-variant-numeric:tabular-nums}
.stack{display:flex;height:20px;min-width:20rem;border-radius:3px;overflow:hidden}.stack i{display:block}
.memory{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:1rem 1.2rem}
.curve{margin:0;display:grid;grid-template:auto 140px 18px/4.6em 1fr;font-size:11px;color:var(--soft)}
.curve figcaption{grid-column:2;font-size:13px}.curve svg{width:100%;height:100%;background:var(--row)}
.curve>div{position:relative}.curve .along{grid-column:2}.curve span{position:absolute;white-space:nowrap}
.up span{right:6px;transform:translateY(-50%)}.along span{transform:translateX(-50%)}
.grid line{stroke:var(--fg);stroke-opacity:.18;vector-effect:non-scaling-stroke}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--row);padding:.8rem;border-radius:8px;font-size:12.5px}
@media (max-width:600px){body{padding:.6rem}.card{flex:1 1 40%}td:first-child{white-space:normal}
.stack{min-width:7rem}.last td:last-child{min-width:8rem}
.clock span:nth-child(even){display:none}}
"""

SCRIPT = """
for (const box of document.querySelectorAll('.zoomed')) {
  const chart = box.querySelector('.chart'), inner = box.querySelector('.inner'), said = box.querySelector('.said');
  const bars = [...box.querySelectorAll('.bar[data-t]')];
  let zoom = 1, at = -1;
  const set = (next, x) => {
    next = Math.min(200, Math.max(1, next));
    const spot = (chart.scrollLeft + x) / (chart.clientWidth * zoom);
    zoom = next;
    inner.style.width = 100 * zoom + '%';
    chart.scrollLeft = spot * chart.clientWidth * zoom - x;
  };
  const show = bar => {
    bars.forEach(b => b.classList.toggle('on', b === bar));
    at = bars.indexOf(bar);
    said.textContent = bar ? bar.dataset.t : '';
  };
  const go = step => {
    if (!bars.length) return;
    show(bars[Math.min(bars.length - 1, Math.max(0, at + step))]);
    const bar = bars[at];
    if (bar.offsetLeft < chart.scrollLeft || bar.offsetLeft > chart.scrollLeft + chart.clientWidth - 40)
      chart.scrollLeft = bar.offsetLeft - chart.clientWidth / 3;
  };
  const middle = () => chart.clientWidth / 2;
  const acts = {'+': () => set(zoom * 1.5, middle()), '=': () => set(zoom * 1.5, middle()),
    '-': () => set(zoom / 1.5, middle()), '0': () => set(1, 0),
    'ArrowRight': () => go(1), 'ArrowLeft': () => go(-1), 'Escape': () => show(null)};
  chart.addEventListener('keydown', e => {
    if (acts[e.key] && !e.ctrlKey && !e.metaKey && !e.altKey) { acts[e.key](); e.preventDefault(); }
  });
  chart.addEventListener('wheel', e => {
    if (!e.ctrlKey) return;
    e.preventDefault();
    set(zoom * Math.exp(-e.deltaY / 300), e.clientX - chart.getBoundingClientRect().left);
  }, {passive: false});
  chart.addEventListener('click', e => { const b = e.target.closest('.bar[data-t]'); if (b) show(b); });
  for (const b of box.querySelectorAll('button')) b.addEventListener('click', () => acts[b.dataset.k]());
}
"""

TOOLS = (
    '<div class="tools"><button data-k="-" aria-label="zoom out">−</button><button data-k="+" aria-label="zoom in">+'
    '</button><button data-k="0">all</button><span class="soft">keys: + − 0 to zoom, ← → from one to the next; or ctrl'
    " and the wheel</span></div>"
)


def page(title: str, body: str) -> str:
    """A whole page, which needs no other file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width,initial-scale=1"><title>{title}</title><style>{STYLE}</style></head>\n'
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )
