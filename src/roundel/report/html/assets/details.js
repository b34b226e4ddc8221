// The selected layer: what it loses and why, its histogram, its weights.

const LEVELS = [
  ['introduced', 'introduced here', true],
  ['inherited', 'inherited', false],
  ['total', 'total', false],
  ['rounding', 'storing alone', false],
];

let logarithmic = true;

function detailsCard() {
  const body = h('div');
  const panel = h('section', { class: 'card', id: 'details', 'aria-label': 'The selected layer', tabindex: -1 }, body);
  const show = (index, options) => {
    body.replaceChildren(...detailParts(index, () => show(index, {})));
    // On a narrow page the panel lies between chart and table: bring it into sight for a click in the table.
    if (options.from === 'table' && window.matchMedia('(max-width: 1080px)').matches) panel.scrollIntoView({ block: 'start' });
    if (options.from === 'chart' || options.from === 'table') panel.scrollTop = 0;
  };
  selection.listeners.push(show);
  show(selection.index, {});
  return panel;
}

function detailParts(index, redraw) {
  const layer = layers[index];
  const step = (to, words, sign) => h('button', {
    class: 'button square', type: 'button', 'aria-label': words, title: words, disabled: to < 0 || to >= layers.length,
    onclick: () => select(to, { from: 'details' }),
  }, sign);
  const rank = ranking.indexOf(index);
  return [
    h('div', { class: 'walk' },
      h('span', { class: 'small soft' }, rank >= 0 ? `number ${rank + 1} of ${ranking.length} by ${METRICS.effect ? 'its effect on the outputs' : 'introduced error'}` : 'introduces no error'),
      h('span', {}, step(index - 1, 'Previous layer', '←'), ' ', step(index + 1, 'Next layer', '→'))),
    h('h2', { class: 'name' }, breakable(layer.name)),
    h('p', { class: 'small soft' }, `${layer.op} · ${shape(layer.shape)}`),
    h('ul', { class: 'why' }, [layer.origin, ...layer.why].map((text) => h('li', {}, text))),
    levels(layer),
    histogramPart(layer, redraw),
    ...layer.weights.map((number) => weightPart(values.weights[number])),
    factsPart(layer),
    neighbours(index),
  ].filter(Boolean);
}

function levels(layer) {
  const rows = LEVELS.map(([key, words, main]) => {
    const track = h('div', { class: main ? 'track main' : 'track' }, h('i'));
    track.firstChild.style.width = `${100 * lost(layer[key])}%`;
    return [h('span', { class: 'soft' }, words), track, h('span', { class: 'number' }, withUnit(layer[key]))];
  });
  return h('section', {}, h('h3', {}, 'Error'), h('div', { class: 'levels' }, rows),
    h('p', { class: 'small soft' }, 'Signal over noise; a longer bar is more error.'));
}

// One scale for all kinds of error: 0 dB fills the bar, 70 dB leaves it empty.
function lost(value) {
  const n = number(value);
  if (n === null || Number.isNaN(n) || n === Infinity) return 0;
  return Math.min(1, Math.max(0.01, (70 - n) / 70));
}

function histogramPart(layer, redraw) {
  const box = h('input', { type: 'checkbox', id: 'log', onchange: (event) => { logarithmic = event.target.checked; redraw(); document.getElementById('log').focus(); } });
  box.checked = logarithmic;
  return h('section', {},
    h('div', { class: 'walk' }, h('h3', {}, 'Float values and the chosen range'), h('label', {}, box, 'log')),
    histogramPlot(layer, logarithmic),
    h('p', { class: 'small soft' }, rangeWords(layer)));
}

function rangeWords(layer) {
  const { stored } = layer;
  if (!stored) return 'Kept in float: no range was chosen.';
  const words = [`Stored as ${stored.type}`];
  if (number(stored.scale) > 0) words.push(`step ${plain(stored.scale)}`);
  if (layer.use !== null) words.push(`${share(layer.use)} of the range used`);
  if (layer.cut !== null) words.push(`${share(layer.cut)} of the values cut off`);
  if (layer.rescaled) words.push('channels rescaled by equalization');
  return words.join(', ') + '.';
}

function weightPart(weight) {
  const { stored } = weight;
  const kind = stored ? `${stored.type}${stored.scales > 1 ? `, ${stored.scales} scales` : ''}` : 'float';
  const line = `${weight.role} ${weight.name}: ${shape(weight.shape)}, ${kind}, ${withUnit(weight.error)}`;
  if (!weight.after) return h('section', {}, h('p', { class: 'small soft' }, line));
  const grouped = weight.after.length / 2 < weight.count ? ' Neighbouring channels share a bar.' : '';
  const spread = (value) => (value === null ? '' : ` (widest ${plain(value, 3)}× the median)`);
  return h('section', {},
    h('h3', {}, 'Weight range of each output channel'),
    weight.before ? [
      h('h4', {}, h('i', { class: 'key before' }), `before equalization${spread(weight.spread[0])}`),
      channelsPlot(weight.before, 'before', `Ranges of ${weight.count} channels before equalization`, null),
    ] : null,
    h('h4', {}, h('i', { class: 'key after' }), `${weight.before ? 'after equalization, as stored' : 'as stored; not equalized'}${spread(weight.spread[1])}`),
    channelsPlot(weight.after, 'after', `Ranges of ${weight.count} channels as stored`, storedRange(stored)),
    h('p', { class: 'small soft' }, line + '.' + grouped));
}

function factsPart(layer) {
  const rows = [
    ['tensor', h('span', { class: 'mono' }, layer.tensor)],
    ['nodes', layer.nodes.length ? h('span', { class: 'mono' }, layer.nodes.join(', ')) : null],
    ['float values', `${plain(layer.values[0])} to ${plain(layer.values[1])}`],
    ['cosine', plain(layer.cosine, 6)],
    ['worst error', plain(layer.worst)],
    ['worst channels', layer.channels.length && layer.axis !== null
      ? layer.channels.map(([channel, level, part]) => `${channel} (${withUnit(level)}, ${share(part)})`).join(', ') : null],
    ['runs on', layer.runs === 'npu' ? `NPU, island ${layer.island}` : layer.runs === 'cpu' ? `CPU: ${layer.cpu.join('; ')}` : null],
    ['multiplications', layer.macs ? plain(layer.macs, 3) : null],
    ...layer.steps.map(([step, before, after, kept]) =>
      [step, kept ? `${db(before)} → ${withUnit(after)} on held-out samples` : `no gain, left as it was (${withUnit(before)})`]),
  ];
  return h('section', {}, h('h3', {}, 'Facts'), h('dl', { class: 'facts' },
    rows.filter(([, value]) => value).map(([term, value]) => [h('dt', {}, term), h('dd', {}, value)])));
}

function neighbours(index) {
  const list = (words, indices) => (indices.length ? [h('h4', {}, words), h('div', { class: 'links' },
    indices.slice(0, 12).map((to) => h('button', { class: 'link', type: 'button', onclick: () => select(to, { from: 'details' }) },
      `${tail(layers[to].name, 44)}  ${db(layers[to].introduced)}`)))] : null);
  return h('section', {}, list('reads', layers[index].from), list('is read by', grid.readers[index]));
}
