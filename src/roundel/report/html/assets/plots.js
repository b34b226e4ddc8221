// Small drawings for one layer, as SVG.

const PLOT = { width: 372, left: 8, right: 8 };

function plotFrame(height, words, ...children) {
  return s('svg', { class: 'plot', viewBox: `0 0 ${PLOT.width} ${height}`, role: 'img', 'aria-label': words }, children);
}

const hatching = (id, name, size) => s('pattern', { id, width: size, height: size, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
  s('line', { x1: 0, y1: 0, x2: 0, y2: size, class: name }));

// The range that the codes reach, where there is one.
function storedRange(stored) {
  if (!stored || stored.scales > 1) return null;
  const range = [number(stored.low), number(stored.high)];
  return range.every(Number.isFinite) && range[1] > range[0] && Math.abs(range[1]) < 1e30 ? range : null;
}

// Float values, with the range that was chosen for them; what lies outside is hatched.
function histogramPlot(layer, logarithmic) {
  const [low, high] = layer.histogram.slice(0, 2).map(number);
  const counts = layer.histogram[2];
  const range = storedRange(layer.stored);
  if (!counts.length || !Number.isFinite(low) || !Number.isFinite(high)) return h('p', { class: 'small soft' }, 'No finite values.');
  const [top, base, height] = [30, 150, 172];
  let [from, to] = range ? [Math.min(low, range[0]), Math.max(high, range[1])] : [low, high];
  if (to <= from) [from, to] = [from - 0.5, to + 0.5];
  const margin = (to - from) * 0.03;
  const x = (value) => PLOT.left + ((value - from + margin) / (to - from + 2 * margin)) * (PLOT.width - PLOT.left - PLOT.right);
  const most = Math.max(1, ...counts);
  const tall = (count) => (count ? Math.max(1, (base - top) * (logarithmic ? Math.log1p(count) / Math.log1p(most) : count / most)) : 0);
  const bin = (high - low) / counts.length || to - from;
  const bars = (keep) => counts.map((count, i) => {
    const middle = low + (i + 0.5) * bin;
    if (!count || keep !== (!range || (middle >= range[0] - bin && middle <= range[1] + bin))) return '';
    const wide = Math.max(0.8, x(low + bin) - x(low) - 0.6);
    return `M${x(low + i * bin).toFixed(1)} ${base}v-${tall(count).toFixed(1)}h${wide.toFixed(1)}V${base}z`;
  }).join('');
  const end = PLOT.width - PLOT.right;
  const edges = range && [
    s('rect', { class: 'outside', x: PLOT.left, y: top, width: Math.max(0, x(range[0]) - PLOT.left), height: base - top }),
    s('rect', { class: 'outside', x: x(range[1]), y: top, width: Math.max(0, end - x(range[1])), height: base - top }),
    range.map((value, i) => [
      s('line', { class: 'edge', x1: x(value), x2: x(value), y1: top - 6, y2: base }),
      s('text', { class: 'edge-text', x: Math.min(end, Math.max(PLOT.left, x(value))), y: top - 10, 'text-anchor': i ? 'end' : 'start' }, plain(value)),
    ]),
  ];
  const ticks = [[low, 'start'], [high, 'end']].map(([value, anchor]) =>
    s('text', { x: x(value), y: base + 14, 'text-anchor': anchor }, plain(value)));
  const zero = from < 0 && to > 0 && Math.min(Math.abs(x(0) - x(low)), Math.abs(x(0) - x(high))) > 50
    ? [s('line', { class: 'axis', x1: x(0), x2: x(0), y1: base, y2: base + 4 }), s('text', { x: x(0), y: base + 14, 'text-anchor': 'middle' }, '0')]
    : [];
  const words = `Histogram of ${layer.tensor} from ${plain(low)} to ${plain(high)}`
    + (range ? `; stored range ${plain(range[0])} to ${plain(range[1])}` : '');
  return plotFrame(height, words, s('defs', {}, hatching('hatch', 'hatch', 6)),
    s('path', { class: 'bars', d: bars(true) }), s('path', { class: 'lost', d: bars(false) }), edges,
    s('line', { class: 'axis', x1: PLOT.left, x2: end, y1: base, y2: base }), ticks, zero);
}

// One bar from low to high for each channel (or for a few neighbours).
function channelsPlot(ranges, kind, words, range) {
  const [top, base, height] = [8, 92, 108];
  const pairs = [];
  for (let i = 0; i < ranges.length; i += 2) pairs.push([number(ranges[i]), number(ranges[i + 1])]);
  const from = pairs.reduce((least, [low]) => Math.min(least, low), 0);
  const to = pairs.reduce((most, [, high]) => Math.max(most, high), 0);
  const left = 40;
  const y = (value) => top + ((to - value) / (to - from || 1)) * (base - top);
  const step = (PLOT.width - left - PLOT.right) / pairs.length;
  const wide = Math.max(0.5, step * (step > 3 ? 0.72 : 0.95));
  const path = pairs.map(([low, high], i) => {
    const tall = Math.max(0.8, y(low) - y(high));
    return `M${(left + i * step).toFixed(1)} ${y(high).toFixed(1)}h${wide.toFixed(2)}v${tall.toFixed(1)}h-${wide.toFixed(2)}z`;
  }).join('');
  const label = (value) => s('text', { x: left - 6, y: y(value) + 3.5, 'text-anchor': 'end' }, plain(value, 2));
  const inside = (value) => value > from && value < to;
  const lines = (range || []).filter(inside).map((value) => s('line', { class: 'edge', x1: left, x2: PLOT.width - PLOT.right, y1: y(value), y2: y(value) }));
  return plotFrame(height, words,
    s('line', { class: 'axis', x1: left, x2: PLOT.width - PLOT.right, y1: y(0), y2: y(0) }),
    s('path', { class: kind, d: path }), lines, label(to), from < 0 ? label(from) : null,
    s('text', { x: left, y: height - 2 }, 'channel 0'),
    s('text', { x: PLOT.width - PLOT.right, y: height - 2, 'text-anchor': 'end' }, 'last'));
}
