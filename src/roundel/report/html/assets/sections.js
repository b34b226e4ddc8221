// What was done, where it will run, how long it took, and how to do it again.

function stepsCard() {
  const { steps } = values;
  const gain = (step) => (step.kept
    ? [`${db(step.before)} → `, h('b', {}, withUnit(step.after))]
    : [`${db(step.before)} → `, h('s', {}, step.refused === null ? db(step.before) : withUnit(step.refused))]);
  const row = (step) => h('tr', {}, h('td', {}, step.name, step.foreseen ? h('span', { class: 'soft small' }, ' (ahead of rounding)') : null), h('td', { class: 'number' }, gain(step)),
    h('td', {}, step.kept ? h('span', { class: 'tag good' }, '✓ kept') : h('span', { class: 'tag' }, '✗ dropped')),
    h('td', { class: 'number' }, seconds(step.seconds)));
  const detail = (step) => h('details', {}, h('summary', {}, `${step.name}: ${counted(step.layers.length, 'layer')}`),
    h('div', { class: 'tall' }, h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, 'layer'), h('th', { class: 'number' }, 'before'), h('th', { class: 'number' }, 'after'))),
      h('tbody', {}, step.layers.map(([name, op, before, after, kept]) => h('tr', {},
        h('td', {}, h('span', { class: 'mono' }, name), ' ', h('span', { class: 'soft small' }, op)),
        h('td', { class: 'number' }, db(before)), h('td', { class: 'number' }, kept ? db(after) : 'as it was')))))));
  return card('steps', 'Improvement steps',
    h('p', { class: 'lead' }, 'Output SQNR on held-out samples, before and after each step; a step stays only where the error falls. Steps before rounding are judged with finer weights, as rounding will about leave them.'),
    steps.length ? [h('div', { class: 'scroll' }, h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, 'step'), h('th', { class: 'number' }, 'SQNR'), h('th', {}, ''), h('th', { class: 'number' }, 'time'))),
      h('tbody', {}, steps.map(row)))), steps.filter((step) => step.layers.length).map(detail)]
      : h('p', { class: 'small' }, 'None: calibration only.'));
}

// Every node in order of execution; islands are solid and alternate in shade, the CPU is hatched.
function strip(npu) {
  const across = 60;
  const [wide, high, gap] = [10, 14, 2];
  const count = npu.strip.length;
  const lines = Math.ceil(count / across);
  const cell = ([name, op, island], i) => s('rect', {
    class: island < 0 ? 'cpu' : island % 2 ? 'npu other' : 'npu', rx: 2,
    x: (i % across) * (wide + gap) + 1, y: Math.floor(i / across) * (high + gap) + 1, width: wide, height: high,
  }, s('title', {}, `${name} (${op}): ${island < 0 ? 'CPU' : `NPU island ${island}`}`));
  return s('svg', { class: 'strip', viewBox: `0 0 ${across * (wide + gap)} ${lines * (high + gap) + 2}`, role: 'img',
    'aria-label': `${npu.npu} nodes on the NPU, ${npu.cpu} on the CPU, in order of execution` },
  s('defs', {}, hatching('strip-hatch', 'strip-hatch', 4)), npu.strip.map(cell));
}

function npuCard() {
  const { npu } = values;
  if (!npu) return card('npu', 'NPU', h('p', { class: 'small' }, values.unchecked || 'No prediction was asked for.'));
  const outside = npu.outside.map((group) => h('details', {},
    h('summary', {}, `${counted(group.nodes.length, 'node')}: ${group.reason}${group.rule ? ` (${group.rule})` : ''}`),
    h('ul', { class: 'plain' }, group.nodes.map(([name, op]) => h('li', {}, h('span', { class: 'mono' }, name), ` ${op}`)))));
  const tags = { error: 'bad', warning: 'warn', note: '' };
  const findings = npu.findings.map((found) => h('div', { class: 'finding' },
    h('span', { class: `tag ${tags[found.level]}` }, found.level), ' ', h('b', {}, `${found.rule} ${found.title}`),
    found.hits.length > 1 ? h('span', { class: 'soft' }, ` ${found.hits.length}×`) : null,
    h('ul', {}, found.hits.slice(0, 3).map(([, message]) => h('li', {}, message)),
      found.hits.length > 3 ? h('li', {}, `and ${found.hits.length - 3} more`) : null),
    h('div', {}, found.why), h('div', {}, h('b', {}, 'Fix: '), found.fix)));
  return card('npu', `NPU islands on ${npu.device}`,
    h('p', { class: 'lead' }, `${npu.format}: ${counted(npu.islands, 'island')}, ${npu.npu} nodes on the NPU`
      + `${npu.share === null ? '' : ` with ${share(npu.share)} of the multiplications`}, ${npu.cpu} on the CPU. `
      + 'Solid: NPU. Hatched: CPU.'),
    strip(npu), outside.length ? [h('h3', {}, 'On the CPU'), outside] : null,
    findings.length ? h('details', { open: npu.findings.some((found) => found.level === 'error') },
      h('summary', {}, counted(npu.findings.length, 'finding')), findings) : null,
    h('ul', { class: 'plain soft' }, npu.notes.map((note) => h('li', {}, note))));
}

function timesCard() {
  const most = Math.max(1e-9, ...values.times.map(([, took]) => number(took)));
  return card('times', 'Time', h('div', { class: 'times' }, values.times.map(([what, took]) => {
    const bar = h('i');
    bar.style.width = `${(100 * number(took)) / most}%`;
    return [h('span', {}, what), h('div', { class: 'track' }, bar), h('span', { class: 'number' }, seconds(took))];
  })));
}

function copyable(text, kind) {
  const pre = h('pre', { class: kind, tabindex: 0 }, text);
  const button = h('button', { class: 'button', type: 'button', onclick: async () => {
    button.textContent = (await copy(text, pre)) ? 'Copied' : 'Press Ctrl+C';
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  } }, 'Copy');
  return h('div', { class: 'code' }, pre, button);
}

// Where the browser keeps the clipboard to itself, the text is left selected.
async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand('copy');
  }
}

function recipeCard() {
  if (values.recipe === null) {
    return card('recipe', 'Recipe', h('p', { class: 'small' },
      'Not known: no record of Roundel lies beside the quantized model.'));
  }
  return card('recipe', 'Do it again',
    h('p', { class: 'lead' }, 'Save the recipe as recipe.yaml, then run:'),
    copyable(values.command, 'one'), copyable(values.recipe, ''));
}

function notesCard() {
  const { notes, unmatched, counts } = values;
  const list = (rows) => h('ul', { class: 'plain' }, rows.map(([name, reason]) => h('li', {}, h('span', { class: 'mono' }, name), `: ${reason}`)));
  const part = (words, rows) => (rows.length ? h('details', {}, h('summary', {}, words), list(rows)) : null);
  const left = counts ? counts.left : [];
  const prepared = counts ? counts.prepared : [];
  if (!notes.length && !unmatched.length && !left.length && !prepared.length) return null;
  return card('notes', 'Notes',
    notes.length ? h('ul', { class: 'plain' }, notes.map((note) => h('li', {}, note))) : null,
    part(`${counted(left.length, 'node')} left in float, and why`, left),
    part(`${counted(prepared.length, 'kind')} of rewrites before quantization`, prepared),
    part(`${counted(unmatched.length, 'tensor')} of the quantized model without a partner`, unmatched));
}
