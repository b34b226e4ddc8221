// Elements, numbers as text, and the values of the report. Text is set as text: no name becomes markup.

const values = JSON.parse(document.getElementById('values').textContent);
const layers = values.layers;

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const s = (tag, properties, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), properties, children);

// Figures that are not finite travel as words.
const WORDS = { inf: Infinity, '-inf': -Infinity, nan: NaN };
const number = (value) => (typeof value === 'string' ? WORDS[value] : value);

function db(value) {
  const n = number(value);
  if (n === null || Number.isNaN(n)) return '–';
  if (n === Infinity) return 'exact';
  return n === -Infinity ? '−∞' : n.toFixed(1).replace('-', '−');
}

const withUnit = (value) => (Number.isFinite(number(value)) && value !== null ? `${db(value)} dB` : db(value));

function share(value) {
  if (value === null || value === undefined) return '–';
  const percent = 100 * value;
  if (percent === 0 || percent >= 99.95) return `${percent.toFixed(0)} %`;
  if (percent < 0.01) return '<0.01 %';
  return percent < 10 ? `${percent.toPrecision(2)} %` : `${percent.toFixed(1)} %`;
}

function plain(value, digits = 4) {
  const n = number(value);
  if (n === null || n === undefined || Number.isNaN(n)) return '–';
  if (!Number.isFinite(n)) return n > 0 ? '∞' : '−∞';
  const size = Math.abs(n);
  const text = size !== 0 && (size >= 1e6 || size < 1e-4)
    ? n.toExponential(2)
    : String(Number(n.toPrecision(digits)));
  return text.replace('-', '−');
}

const fixed = (value, digits) => (Number.isFinite(number(value)) ? number(value).toFixed(digits) : '–');

function bytes(count) {
  if (count === null || count === undefined) return '–';
  for (const [unit, size] of [['GB', 1e9], ['MB', 1e6], ['KB', 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

function seconds(value) {
  const n = number(value);
  if (n >= 120) return `${Math.floor(n / 60)} min ${Math.round(n % 60)} s`;
  return n >= 10 ? `${n.toFixed(0)} s` : `${n.toFixed(n < 0.1 ? 2 : 1)} s`;
}

function counted(count, one, many) {
  return `${count.toLocaleString('en')} ${count === 1 ? one : many || one + 's'}`;
}

// The end of a long name, where names differ.
const tail = (name, most) => (name.length <= most ? name : '…' + name.slice(1 - most));
// A name that may be broken where its parts end.
const breakable = (name) => name.split(/(?<=[/.:])/).flatMap((part) => [part, h('wbr')]);
const shape = (dims) => (dims.length ? dims.join(' × ') : 'scalar');
const card = (id, title, ...children) =>
  h('section', { class: 'card', id, 'aria-labelledby': `${id}-title` }, h('h2', { id: `${id}-title` }, title), children);
