// The whole network in one strip: a bar for the chosen error of each column, a line for the total error, and
// the part that the chart shows as a window that can be dragged.

class Overview {
  constructor(chart) {
    this.chart = chart;
    this.canvas = h('canvas', { id: 'overview', 'aria-hidden': 'true' });
    chart.watchers.push(() => this.draw());
    const go = (event) => {
      if (event.type === 'pointerdown') this.canvas.setPointerCapture(event.pointerId);
      else if (!event.buttons) return;
      const box = this.canvas.getBoundingClientRect();
      const column = ((event.clientX - box.left - 8) / (box.width - 16)) * grid.columns;
      const { view } = chart;
      view.pan(view.width / 2 - (column * BOX.stepX * view.scale + view.x), 0);
      chart.draw();
    };
    this.canvas.addEventListener('pointerdown', go);
    this.canvas.addEventListener('pointermove', go);
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const step = (width - 16) / grid.columns;
    this.columns = this.gathered(Math.max(1, Math.ceil(3 / step)));
    const [top, bottom] = [18, height - 6];
    // One axis for bars and line: decibels, downwards.
    const { metric, best } = this.chart.scale;
    const [worst, least] = [Math.min(scales[metric].worst, scales.total.worst), Math.max(best, scales.total.best)];
    this.part = (value) => {
      const n = number(value);
      return n === null || Number.isNaN(n) ? 0 : Math.min(1, Math.max(0, (least - n) / (least - worst)));
    };
    this.bars(pen, step, top, bottom);
    this.line(pen, step, top, bottom);
    this.window(pen, step, height);
    pen.fillStyle = cssColour('--soft');
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.fillText(`whole network; bars: ${METRICS[metric]}, line: total error`, 9, 12);
    pen.textAlign = 'right';
    pen.fillText(`${db(worst)} to ${db(least)} dB`, width - 8, 12);
  }

  // Where columns are narrower than a pixel or three, neighbours share a bar: the worst of them.
  gathered(count) {
    const found = [];
    for (let column = 0; column < grid.columns; column += count) {
      found.push({ column, count, indices: grid.byColumn.slice(column, column + count).flat() });
    }
    return found;
  }

  bars(pen, step, top, bottom) {
    const { scale } = this.chart;
    const outline = cssColour('--strong-line');
    const severity = (index) => scale.severity(layers[index][scale.metric]) ?? -1;
    this.columns.forEach(({ column, count, indices }) => {
      const value = layers[indices.reduce((a, b) => (severity(b) > severity(a) ? b : a))][scale.metric];
      const tall = Math.max(2, this.part(value) * (bottom - top));
      pen.fillStyle = paint(scale.severity(value) ?? 0)[0];
      pen.strokeStyle = outline;
      pen.lineWidth = 0.6;
      const wide = step * count * 0.8;
      pen.fillRect(8 + column * step, bottom - tall, wide, tall);
      if (wide > 4) pen.strokeRect(8 + column * step, bottom - tall, wide, tall);
    });
  }

  line(pen, step, top, bottom) {
    pen.beginPath();
    this.columns.forEach(({ column, count, indices }) => {
      const worst = Math.max(...indices.map((index) => this.part(layers[index].total)));
      pen.lineTo(8 + (column + 0.4 * count) * step, bottom - worst * (bottom - top));
    });
    pen.strokeStyle = cssColour('--accent');
    pen.lineWidth = this.columns.length > 150 ? 1 : 1.6;
    pen.stroke();
  }

  window(pen, step, height) {
    const { view } = this.chart;
    const column = (x) => 8 + Math.min(grid.columns, Math.max(0, (x - view.x) / view.scale / BOX.stepX)) * step;
    const [from, to] = [column(0), column(view.width)];
    pen.fillStyle = cssColour('--accent');
    pen.globalAlpha = 0.1;
    pen.fillRect(from, 0, to - from, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = cssColour('--accent');
    pen.lineWidth = 1.5;
    pen.strokeRect(from + 0.75, 0.75, Math.max(3, to - from - 1.5), height - 1.5);
    const at = 8 + (layers[selection.index].at[0] + 0.4) * step;
    pen.fillStyle = cssColour('--ink');
    pen.beginPath();
    pen.moveTo(at - 5, height);
    pen.lineTo(at + 5, height);
    pen.lineTo(at, height - 6);
    pen.fill();
  }
}

function chartCard() {
  const chart = new Chart();
  const overview = new Overview(chart);
  const colourBy = h('select', { id: 'metric', onchange: (event) => { chart.show(event.target.value); legend(); } },
    Object.entries(METRICS).map(([key, words]) => h('option', { value: key }, words)));
  const button = (label, words, action) =>
    h('button', { class: 'button square', type: 'button', 'aria-label': words, title: words, onclick: action }, label);
  const ramp = h('canvas', { width: 140, height: 12 });
  const [low, high] = [h('span'), h('span')];
  function legend() {
    const { worst, best } = chart.scale;
    const pen = ramp.getContext('2d');
    for (let x = 0; x < 140; x++) {
      pen.fillStyle = paint(1 - x / 139)[0];
      pen.fillRect(x, 0, 1, 12);
    }
    low.textContent = `more error: ${db(worst)} dB`;
    high.textContent = `${db(best)} dB and better`;
  }
  legend();
  darkPage.addEventListener('change', legend);
  const sample = (inside, words) => h('span', {}, s('svg', { viewBox: '0 0 26 15', 'aria-hidden': 'true' }, inside), words);
  const box = (more) => s('rect', { x: 1, y: 1, width: 24, height: 13, rx: 4, fill: 'none', stroke: 'currentColor', ...more });
  return h('section', { class: 'card', id: 'chart-card', 'aria-labelledby': 'chart-title' },
    h('h2', { id: 'chart-title' }, 'The network'),
    h('p', { class: 'lead' }, 'Each box is a layer with what it adds to the error, as signal over noise in dB: '
      + 'the lower the number, the worse. Click a box for its histogram and weights.'),
    h('div', { class: 'tools' },
      h('label', {}, 'Colour by', colourBy),
      h('span', { class: 'small soft' }, 'Drag to move, pinch or Ctrl + wheel to zoom'),
      h('div', { class: 'end' },
        button('−', 'Zoom out', () => chart.zoom(1 / 1.4)), button('+', 'Zoom in', () => chart.zoom(1.4)),
        h('button', { class: 'button', type: 'button', onclick: () => chart.fit() }, 'Show all'))),
    h('div', { class: 'chart-frame' }, chart.canvas, overview.canvas),
    h('div', { class: 'legend' },
      h('span', { class: 'ramp' }, low, ramp, high),
      sample(s('rect', { x: 2, y: 5, width: 18, height: 5, fill: 'currentColor' }), 'longer bar: more error'),
      sample([s('circle', { cx: 13, cy: 7.5, r: 7, fill: 'currentColor' })], 'numbered: the five worst'),
      layers.some((layer) => layer.stored === null) ? sample(box({ 'stroke-dasharray': '3 2' }), 'kept in float') : null,
      layers.some((layer) => layer.runs === 'cpu')
        ? sample([box(), s('path', { d: 'M4 14 L14 1 M12 14 L22 1', stroke: 'currentColor' })], 'on the CPU') : null));
}
