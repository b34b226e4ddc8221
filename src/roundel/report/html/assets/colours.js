// From an error to a colour. The ramp is magma's: its lightness only rises, so that it reads the same with any
// colour vision, and in grey. What stands out from the page is what loses most: dark on light, light on dark.

const MAGMA = [
  [0, 0, 4], [20, 14, 54], [59, 15, 112], [100, 26, 128], [140, 41, 129],
  [183, 55, 121], [222, 73, 104], [247, 112, 92], [254, 159, 109], [254, 207, 146], [252, 253, 191],
];
const darkPage = window.matchMedia('(prefers-color-scheme: dark)');

function magma(t) {
  const at = Math.min(Math.max(t, 0), 1) * (MAGMA.length - 1);
  const low = Math.min(Math.floor(at), MAGMA.length - 2);
  return MAGMA[low].map((c, i) => Math.round(c + (MAGMA[low + 1][i] - c) * (at - low)));
}

// Severity 0 to 1 -> [fill, ink on it].
function paint(severity) {
  const rgb = darkPage.matches ? magma(0.1 + 0.88 * severity) : magma(0.98 - 0.83 * severity);
  const [r, g, b] = rgb.map((c) => (c / 255) ** 2.2);
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return [`rgb(${rgb.join(' ')})`, light > 0.2 ? '#16121c' : '#ffffff'];
}

// What the chart can show, as decibels: the lower, the worse.
const METRICS = {
  introduced: 'error introduced here',
  inherited: 'error inherited',
  total: 'total error',
  ...(layers.some((layer) => layer.effect !== null) ? { effect: 'effect on the outputs' } : {}),
};

// Where the ramp begins and ends: the worst layer, and what nine in ten layers stay below; at least 12 dB apart.
function makeScale(metric) {
  const found = layers.map((layer) => number(layer[metric])).filter((v) => Number.isFinite(v) && v !== null);
  found.sort((a, b) => a - b);
  const worst = found.length ? found[0] : 0;
  const best = Math.max(worst + 12, found.length ? found[Math.floor(0.9 * (found.length - 1))] : 12);
  const severity = (value) => {
    const n = number(value);
    if (n === null || n === undefined || Number.isNaN(n)) return null;
    return Math.min(1, Math.max(0, (best - n) / (best - worst)));
  };
  return { metric, worst, best, severity };
}

const scales = Object.fromEntries(Object.keys(METRICS).map((metric) => [metric, makeScale(metric)]));
const introducedBy = (layer) => scales.introduced.severity(layer.introduced);

// Layers whose own error costs the outputs most, the worst first; then those for which that was not measured,
// by the error that they introduce. Exact ones do not compete.
const effectOf = (index) => (layers[index].effect === null ? Infinity : number(layers[index].effect));
const ranking = layers
  .map((layer, index) => index)
  .filter((index) => Number.isFinite(number(layers[index].introduced)) && layers[index].introduced !== null)
  .sort((a, b) => (effectOf(a) === effectOf(b)
    ? number(layers[a].introduced) - number(layers[b].introduced) : effectOf(a) - effectOf(b)));
const rankOf = new Map(ranking.slice(0, 5).map((index, place) => [index, place + 1]));

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// One layer is selected at any time; whoever shows it listens.
const selection = { index: ranking.length ? ranking[0] : layers.length - 1, listeners: [] };

function select(index, options = {}) {
  if (index < 0 || index >= layers.length) return;
  selection.index = index;
  for (const listener of selection.listeners) listener(index, options);
}
