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
