// The chart that a reader handles: drag, pinch, wheel with Ctrl, keys, and buttons.

const tip = document.getElementById('tip');
const live = document.getElementById('live');

function showTip(layer, x, y) {
  const line = (what, value) => h('div', {}, `${what} ${value}`);
  tip.replaceChildren(
    h('b', {}, tail(layer.name, 60)),
    h('div', {}, `${layer.op}, ${layer.stored ? layer.stored.type : 'float'}`),
    line('introduced here', withUnit(layer.introduced)),
    line('inherited', withUnit(layer.inherited)),
    line('total', withUnit(layer.total)),
    layer.runs ? h('div', {}, layer.runs === 'npu' ? `NPU, island ${layer.island}` : 'CPU') : '',
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > window.innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
}

const hideTip = () => { tip.hidden = true; };

class Chart {
  constructor() {
    this.view = new View();
    this.scale = scales.introduced;
    this.hovered = null;
    this.pointers = new Map();
    this.canvas = h('canvas', {
      id: 'chart', tabindex: 0, role: 'application',
      'aria-label': 'Layer chart. Arrow keys move from layer to layer, plus and minus zoom, 0 shows all. '
        + 'The table below holds the same figures.',
    });
    // As tall as the network is wide, within reason.
    this.canvas.style.height = `${Math.min(440, Math.max(200, grid.lanes * BOX.stepY + 110))}px`;
    this.painter = new Painter(this.canvas, this.view);
    this.watchers = [];
    this.listen();
  }

  listen() {
    const on = (name, handler, options) => this.canvas.addEventListener(name, handler.bind(this), options);
    on('pointerdown', this.press);
    on('pointermove', this.move);
    on('pointerup', this.release);
    on('pointercancel', this.release);
    on('pointerleave', () => this.hover(null));
    on('wheel', this.wheel, { passive: false });
    on('keydown', this.key);
    darkPage.addEventListener('change', () => this.draw());
    new ResizeObserver(() => this.resized()).observe(this.canvas);
    selection.listeners.push((index) => {
      if (!this.view.sees(index)) this.view.centre(index);
      this.draw();
    });
  }

  resized() {
    const first = this.view.width === 1;
    this.view.resize(this.canvas.clientWidth, this.canvas.clientHeight);
    if (first) this.view.centre(selection.index);
    else this.view.keepInside();
    this.draw();
  }

  // Many events, one picture for each frame.
  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.painter.draw(this.scale, selection.index, this.hovered);
      for (const watcher of this.watchers) watcher();
    });
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.place(event));
    this.moved = this.pointers.size > 1;
  }

  move(event) {
    const [x, y] = this.place(event);
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.hover(this.view.layerAt(x, y), event);
      return;
    }
    if (this.pointers.size === 2) this.pinch(event.pointerId, [x, y]);
    else if (this.moved || Math.hypot(x - before[0], y - before[1]) > 4) {
      this.moved = true;
      this.canvas.classList.add('dragging');
      this.hover(null);
      this.view.pan(x - before[0], y - before[1]);
      this.draw();
    } else return;
    this.pointers.set(event.pointerId, [x, y]);
  }

  pinch(moving, to) {
    const [other] = [...this.pointers].filter(([id]) => id !== moving).map(([, at]) => at);
    const from = this.pointers.get(moving);
    const apart = (one, two) => Math.max(10, Math.hypot(one[0] - two[0], one[1] - two[1]));
    this.view.zoom(apart(to, other) / apart(from, other), (to[0] + other[0]) / 2, (to[1] + other[1]) / 2);
    this.draw();
  }

  release(event) {
    if (this.pointers.delete(event.pointerId) && !this.moved && event.type === 'pointerup') {
      const hit = this.view.layerAt(...this.place(event));
      if (hit !== null) select(hit, { from: 'chart' });
    }
    this.canvas.classList.remove('dragging');
  }

  hover(index, event) {
    if (index !== this.hovered) {
      this.hovered = index;
      this.canvas.classList.toggle('over', index !== null);
      this.draw();
    }
    if (index === null) hideTip();
    else showTip(layers[index], event.clientX, event.clientY);
  }

  // A plain wheel scrolls the page; with Ctrl (as a pinch on a touchpad has it) it zooms.
  wheel(event) {
    const [x, y] = this.place(event);
    if (event.ctrlKey || event.metaKey) this.view.zoom(Math.exp(-event.deltaY * 0.0022), x, y);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.view.pan(-(event.deltaX || event.deltaY), 0);
    } else return;
    event.preventDefault();
    this.hover(null);
    this.draw();
  }

  key(event) {
    const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (steps[event.key]) this.step(...steps[event.key]);
    else if (event.key === '+' || event.key === '=') this.zoom(1.3);
    else if (event.key === '-') this.zoom(1 / 1.3);
    else if (event.key === '0') this.fit();
    else if (event.key === 'Home') select(0, { from: 'chart' });
    else if (event.key === 'End') select(layers.length - 1, { from: 'chart' });
    else return;
    event.preventDefault();
  }

  // Along the graph: right to a reader, left to a source, up and down within the column.
  step(dx, dy) {
    const here = layers[selection.index].at;
    const column = grid.byColumn[here[0] + dx] || [];
    const linked = new Set(dx > 0 ? grid.readers[selection.index] : layers[selection.index].from);
    const distance = (index) => Math.abs(layers[index].at[1] - here[1]) - (linked.has(index) ? 0.5 : 0);
    const able = column.filter((index) => dx !== 0 || (layers[index].at[1] - here[1]) * dy > 0);
    if (!able.length) return;
    const next = able.reduce((best, index) => (distance(index) < distance(best) ? index : best));
    select(next, { from: 'chart' });
    const layer = layers[next];
    live.textContent = `${layer.name}, ${layer.op}, introduced ${withUnit(layer.introduced)}, total ${withUnit(layer.total)}`;
  }

  zoom(factor) {
    this.view.zoom(factor);
    this.draw();
  }

  fit() {
    this.view.fit();
    this.draw();
  }

  show(metric) {
    this.scale = scales[metric];
    this.draw();
  }
}
