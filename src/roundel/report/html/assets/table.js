// All layers as a table: sorted by any column, filtered by words, operator and place.

const meter = (layer) => {
  const severity = introducedBy(layer);
  const bar = h('span', { class: 'meter', 'aria-hidden': 'true' }, h('i'));
  bar.firstChild.style.width = `${100 * (number(layer.introduced) === Infinity ? 0 : severity || 0)}%`;
  bar.firstChild.style.background = paint(severity || 0)[0];
  return bar;
};
const NAME_LETTERS = window.matchMedia('(max-width: 640px)').matches ? 36 : 64;
const byNumber = (key) => (layer) => number(layer[key]);
const stored = (layer) => (layer.stored ? layer.stored.type : 'float');
const runs = (layer) => (layer.runs === 'npu' ? `NPU ${layer.island}` : layer.runs === 'cpu' ? 'CPU' : '–');

const COLUMNS = [
  { key: 'order', title: '#', hint: 'order of execution', sort: (layer, index) => index, cell: (layer, index) => index + 1, number: true, wide: true },
  { key: 'name', title: 'layer', hint: 'node of the float model', sort: (layer) => layer.name, cell: (layer) => h('span', { class: 'clip', title: layer.name }, breakable(tail(layer.name, NAME_LETTERS))) },
  { key: 'op', title: 'operator', hint: 'main operator of the layer', sort: (layer) => layer.op, cell: (layer) => layer.op },
  { key: 'stored', title: 'stored as', hint: 'element type of its result', sort: stored, cell: stored, wide: true },
  { key: 'introduced', title: 'introduced dB', hint: 'error that the layer adds by itself: lower is worse', sort: byNumber('introduced'), cell: (layer) => [meter(layer), db(layer.introduced)], number: true },
  { key: 'inherited', title: 'inherited dB', hint: 'error that its inputs bring', sort: byNumber('inherited'), cell: (layer) => db(layer.inherited), number: true, wide: true },
  { key: 'total', title: 'total dB', hint: 'error as the next layer sees it', sort: byNumber('total'), cell: (layer) => db(layer.total), number: true },
  { key: 'cosine', title: 'cosine', hint: 'of the angle between float and quantized', sort: byNumber('cosine'), cell: (layer) => fixed(layer.cosine, 4), number: true, wide: true },
  { key: 'cut', title: 'cut off', hint: 'values beyond the stored range', sort: byNumber('cut'), cell: (layer) => share(layer.cut), number: true, wide: true },
  { key: 'use', title: 'range used', hint: 'part of the stored range that the values span', sort: byNumber('use'), cell: (layer) => share(layer.use), number: true, wide: true },
  { key: 'runs', title: 'runs on', hint: 'predicted: NPU with its island, or CPU', sort: runs, cell: runs, wide: true, needs: () => values.npu },
].filter((column) => !column.needs || column.needs());

const ROWS_AROUND = 12; // rows ready above and below those in sight

// Only rows in sight are in the page, between two spacers: ten thousand layers cost no more than fifty.
class LayerTable {
  constructor() {
    this.order = { key: 'introduced', down: false };
    this.made = new Map();
    this.height = 46;
    this.body = h('tbody', { onclick: (event) => this.pick(event), onkeydown: (event) => this.key(event) });
    this.count = h('span', { class: 'small soft', id: 'count', role: 'status' });
    this.search = h('input', { type: 'search', id: 'search', placeholder: 'Find a layer or tensor', 'aria-label': 'Find a layer or tensor', oninput: () => this.show() });
    this.op = this.choice('op', 'all operators', layers.map((layer) => layer.op));
    this.kind = this.choice('kind', 'all types', layers.map(stored));
    this.heads = COLUMNS.map((column) => this.head(column));
    const table = h('table', { id: 'table', 'aria-labelledby': 'table-title' },
      h('colgroup', {}, COLUMNS.map((c) => h('col', { class: c.wide ? `col-${c.key} wide` : `col-${c.key}` }))),
      h('thead', {}, h('tr', { 'aria-rowindex': 1 }, this.heads)), this.body);
    this.nothing = h('p', { class: 'empty', hidden: true }, 'No layer fits.');
    this.frame = h('div', { class: 'rows', onscroll: () => this.fill() }, table, this.nothing);
    this.table = table;
    selection.listeners.push((index, options) => this.mark(index, options));
    new ResizeObserver(() => this.fill()).observe(this.frame);
    window.addEventListener('beforeprint', () => this.fill(true));
    this.show();
  }

  row(index) {
    if (this.made.has(index)) return this.made.get(index);
    const row = h('tr', { tabindex: -1, 'data-layer': index });
    for (const column of COLUMNS) {
      const names = [column.number && 'number', column.wide && 'wide', column.key === 'name' && 'name'].filter(Boolean);
      row.append(h('td', names.length ? { class: names.join(' ') } : null, column.cell(layers[index], index)));
    }
    this.made.set(index, row);
    return row;
  }

  head(column) {
    const names = [column.number && 'number', column.wide && 'wide'].filter(Boolean).join(' ');
    const button = h('button', { type: 'button', title: column.hint, onclick: () => this.sortBy(column.key) }, column.title);
    return h('th', { scope: 'col', class: names || null, 'data-column': column.key }, button);
  }

  choice(id, all, found) {
    const names = [...new Set(found)].sort();
    return h('select', { id, 'aria-label': `Only one of ${all}`, onchange: () => this.show() },
      h('option', { value: '' }, all), names.map((name) => h('option', { value: name }, name)));
  }

  sortBy(key) {
    this.order = { key, down: this.order.key === key ? !this.order.down : false };
    this.show();
  }

  fits(layer, words) {
    const text = `${layer.name} ${layer.tensor} ${layer.op}`.toLowerCase();
    return words.every((word) => text.includes(word))
      && (!this.op.value || layer.op === this.op.value)
      && (!this.kind.value || stored(layer) === this.kind.value);
  }

  // Layers without a figure come last, whichever way the others are sorted.
  sorted() {
    const { sort } = COLUMNS.find((column) => column.key === this.order.key);
    const sign = this.order.down ? -1 : 1;
    const missing = (value) => value === null || value === undefined || Number.isNaN(value);
    const keys = layers.map((layer, index) => sort(layer, index));
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = layers.map((layer, index) => index).filter((index) => this.fits(layers[index], words));
    return kept.sort((a, b) => {
      if (missing(keys[a]) || missing(keys[b])) return missing(keys[a]) - missing(keys[b]) || a - b;
      if (keys[a] === keys[b]) return a - b;
      return (keys[a] < keys[b] ? -1 : 1) * sign;
    });
  }

  show() {
    this.shown = this.sorted();
    this.heads.forEach((head, i) => {
      const own = COLUMNS[i].key === this.order.key;
      if (own) head.setAttribute('aria-sort', this.order.down ? 'descending' : 'ascending');
      else head.removeAttribute('aria-sort');
      head.firstChild.textContent = COLUMNS[i].title + (own ? (this.order.down ? ' ▼' : ' ▲') : '');
    });
    const many = this.shown.length;
    this.table.setAttribute('aria-rowcount', many + 1);
    this.nothing.hidden = many > 0;
    this.count.textContent = many === layers.length ? counted(many, 'layer') : `${many} of ${counted(layers.length, 'layer')}`;
    this.frame.scrollTop = 0;
    this.window = null;
    this.fill();
  }

  // Put the rows that can be seen into the page.
  fill(all = false) {
    const many = this.shown.length;
    const high = this.frame.clientHeight || 600;
    const first = all ? 0 : Math.max(0, Math.floor(this.frame.scrollTop / this.height) - ROWS_AROUND);
    const last = all ? many : Math.min(many, Math.ceil((this.frame.scrollTop + high) / this.height) + ROWS_AROUND);
    if (this.window && this.window[0] === first && this.window[1] === last) return;
    this.window = [first, last];
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const rows = this.shown.slice(first, last).map((index, i) => {
      const row = this.row(index);
      row.setAttribute('aria-rowindex', first + i + 2);
      row.setAttribute('aria-selected', index === selection.index ? 'true' : 'false');
      return row;
    });
    this.body.replaceChildren(this.spacer(first), ...rows, this.spacer(many - last));
    if (rows.length && rows[0].offsetHeight) this.height = rows[0].offsetHeight;
    if (focused && focused.isConnected) focused.focus({ preventScroll: true });
    this.reachable();
  }

  spacer(count) {
    const row = h('tr', { class: 'spacer', 'aria-hidden': 'true' });
    row.style.height = `${count * this.height}px`;
    row.hidden = count === 0;
    return row;
  }

  // Exactly one row takes part in the Tab order; arrow keys go on from it.
  reachable() {
    const [first, last] = this.window;
    const inSight = this.shown.slice(first, last);
    const stop = inSight.includes(selection.index) ? selection.index : inSight[0];
    for (const index of inSight) this.row(index).tabIndex = index === stop ? 0 : -1;
  }

  pick(event) {
    const row = event.target.closest('tr[data-layer]');
    if (row) select(Number(row.dataset.layer), { from: 'table' });
  }

  key(event) {
    const row = event.target.closest('tr[data-layer]');
    const at = this.shown.indexOf(Number(row.dataset.layer));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: this.shown.length - 1 }[event.key];
    if (event.key === 'Enter' || event.key === ' ') select(this.shown[at], { from: 'table' });
    else if (to !== undefined && this.shown[to] !== undefined) {
      select(this.shown[to], { from: 'keys' });
      this.row(this.shown[to]).focus({ preventScroll: true });
    } else return;
    event.preventDefault();
  }

  mark(index, options) {
    for (const row of this.body.querySelectorAll('[aria-selected=true]')) row.setAttribute('aria-selected', 'false');
    if (options.from !== 'table') this.uncover(this.shown.indexOf(index));
    if (this.made.has(index)) this.made.get(index).setAttribute('aria-selected', 'true');
    this.reachable();
  }

  // Scroll the table's own frame, never the page.
  uncover(place) {
    if (place < 0) return;
    const { frame, height } = this;
    const top = place * height;
    const head = this.heads[0].offsetHeight;
    if (top < frame.scrollTop) frame.scrollTop = top;
    else if (top + height + head > frame.scrollTop + frame.clientHeight) frame.scrollTop = top + height + head - frame.clientHeight;
    this.fill();
  }
}

function tableCard() {
  const table = new LayerTable();
  darkPage.addEventListener('change', () => table.made.forEach((row, index) => {
    row.querySelector('.meter').replaceWith(meter(layers[index]));
  }));
  return h('section', { class: 'card', id: 'table-card', 'aria-labelledby': 'table-title' },
    h('h2', { id: 'table-title' }, 'All layers'),
    h('div', { class: 'tools' }, table.search, table.op, table.kind, table.count),
    table.frame);
}
