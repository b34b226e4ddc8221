// What a reader wants to know first.

function headPart() {
  const { preset, samples } = values;
  const chip = (what, value, kind) => h('span', { class: kind ? `chip ${kind}` : 'chip' }, what ? `${what} ` : null, h('b', {}, value));
  const ring = s('svg', { viewBox: '0 0 32 32', 'aria-hidden': 'true' },
    s('circle', { cx: 16, cy: 16, r: 13, fill: 'none', stroke: '#d9493a', 'stroke-width': 5 }),
    s('circle', { cx: 16, cy: 16, r: 5, fill: '#2f6bd8' }));
  return h('div', { class: 'bar' },
    h('div', { class: 'brand' }, ring, 'Roundel report'),
    h('h1', { class: 'title' }, h('span', {}, values.float.name), h('span', { class: 'arrow', 'aria-label': 'to' }, '→'), h('span', {}, values.quantized.name)),
    h('div', { class: 'chips' },
      preset && chip('preset', preset.name), preset && chip('effort', preset.effort),
      preset && preset.mode !== 'static' && chip('mode', preset.mode.replace('_', ' ')),
      chip('measured on', counted(samples.count, 'sample')),
      samples.random && chip('', 'random data: the figures mean nothing for real inputs', 'warn'),
      values.npu && chip('predicted for', values.npu.device)));
}

function figure(what, value, more) {
  return h('div', { class: 'figure' }, h('div', { class: 'what' }, what), h('div', { class: 'value' }, value), h('div', { class: 'more' }, more));
}

function sizeFigure() {
  const [before, after] = [values.float.bytes, values.quantized.bytes];
  if (!after) return null;
  const ratio = before ? before / after : 0;
  const more = !before ? 'quantized file' : ratio >= 1 ? `${ratio.toFixed(1)}× smaller than ${bytes(before)}` : `larger than ${bytes(before)}`;
  return figure('File size', bytes(after), more);
}

function outputFigures() {
  const outputs = values.outputs;
  if (!outputs.length) return [];
  const worst = outputs.reduce((a, b) => (number(b.sqnr) < number(a.sqnr) ? b : a));
  const found = [figure(outputs.length > 1 ? 'Worst output' : 'Output error', withUnit(worst.sqnr),
    `SQNR of ${tail(worst.name, 28)}, cosine ${plain(worst.cosine, 5)}`)];
  const same = outputs.filter((out) => out.same !== null).map((out) => number(out.same));
  if (same.length) found.push(figure('Same answer as float', share(Math.min(...same)), `same top-1 on ${counted(values.samples.count, 'sample')}`));
  return found;
}

function scoreFigures() {
  const [float, quantized] = values.scores;
  if (!quantized) return [];
  const names = [['top1', 'Top-1'], ['top5', 'Top-5']].filter(([key]) => float[key] !== null);
  const found = names.map(([key, title]) => figure(`${title} accuracy`, share(quantized[key]), `float ${share(float[key])}, ${counted(quantized.rows, 'row')}`));
  for (const [name, value] of Object.entries(quantized.metric)) found.push(figure(name, plain(value, 5), `float ${plain(float.metric[name], 5)}`));
  return found;
}

function stepsFigure() {
  const steps = values.steps || [];
  if (!steps.length) return null;
  const kept = steps.filter((step) => step.kept);
  const [first, last] = [steps[0], kept.length ? kept[kept.length - 1] : null];
  return figure('Improvement', `${kept.length} of ${steps.length} `,
    last ? `steps kept: ${db(first.before)} → ${withUnit(last.after)}` : 'steps kept: none lowered the error');
}

// Is it accurate, will it run on the NPU, what next: the words of the summary in the terminal.
function verdictPart() {
  if (!values.verdict) return null;
  const [level, ...rows] = values.verdict;
  const answer = (question, words) => question === 'next'
    ? h('dd', {}, h('code', { class: 'mono' }, words)) : h('dd', {}, words);
  return h('section', { class: `card verdict ${level}`, id: 'verdict', 'aria-label': 'Verdict' },
    h('dl', {}, rows.map(([question, words]) => [h('dt', {}, question), answer(question, words)])));
}

function figuresPart() {
  const { counts, npu } = values;
  const total = values.times.reduce((sum, [, took]) => sum + number(took), 0);
  return h('section', { class: 'figures', id: 'summary', 'aria-label': 'Summary' },
    scoreFigures(), outputFigures(), sizeFigure(), stepsFigure(),
    counts && figure('Quantized', [`${counts.quantized} `, h('small', {}, `of ${counts.quantized + counts.float} nodes`)],
      counts.float ? `${counts.float} left in float` : 'nothing left in float'),
    npu && figure('On the NPU', npu.share === null ? '–' : share(npu.share),
      `of the multiplications; ${counted(npu.islands, 'island')}, ${counted(npu.cpu, 'node')} on the CPU`),
    figure('Time', seconds(total), values.steps ? 'run and comparison' : 'comparison'));
}

function worstCard() {
  const list = ranking.slice(0, 5).map((index, place) => {
    const layer = layers[index];
    const swatch = h('span', { class: 'swatch' }, place + 1);
    const colour = () => { [swatch.style.background, swatch.style.color] = paint(introducedBy(layer)); };
    colour();
    darkPage.addEventListener('change', colour);
    const go = () => { select(index, { from: 'details' }); document.getElementById('chart').scrollIntoView({ block: 'center' }); };
    return h('li', {}, h('button', { type: 'button', onclick: go }, swatch,
      h('span', { class: 'mono' }, breakable(layer.name)), h('b', { class: 'number' }, withUnit(layer.effect ?? layer.introduced)),
      h('span', { class: 'reason' }, (layer.why.length ? layer.why.slice(0, 3) : [layer.origin]).join(' '))));
  });
  return card('worst', 'Which layers hurt most',
    h('p', { class: 'lead' }, METRICS.effect
      ? 'By what their own error alone does to the outputs, as signal over noise there.'
      : 'By the error that they add by themselves, on the float model’s own inputs.'),
    list.length ? h('ol', { class: 'worst' }, list) : h('p', { class: 'small' }, 'No layer introduces an error.'));
}

function outputsCard() {
  const row = (out) => h('tr', {}, h('td', { class: 'mono' }, out.name), h('td', { class: 'number' }, withUnit(out.sqnr)),
    h('td', { class: 'number' }, plain(out.cosine, 6)), h('td', { class: 'number' }, plain(out.worst, 3)),
    h('td', { class: 'number' }, out.same === null ? '–' : share(out.same)));
  return card('outputs', 'Outputs',
    h('p', { class: 'lead' }, `Quantized against float on ${counted(values.samples.count, 'sample')} (${values.samples.words}).`),
    h('div', { class: 'scroll' }, h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, 'output'),
      ['SQNR', 'cosine', 'worst error', 'same top-1'].map((title) => h('th', { class: 'number' }, title)))),
    h('tbody', {}, values.outputs.map(row)))));
}
