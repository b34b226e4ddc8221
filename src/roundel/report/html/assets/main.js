// Everything in its place.

const SECTIONS = [
  ['summary', 'Summary'], ['steps', 'Steps'], ['layers', 'Layers'], ['table-card', 'Table'], ['npu', 'NPU'],
  ['times', 'Time'], ['notes', 'Notes'], ['recipe', 'Recipe'],
];

const column = (...cards) => h('div', { class: 'column' }, cards);

document.getElementById('head').append(headPart());
document.getElementById('main').append(
  ...[
    verdictPart(),
    figuresPart(),
    h('div', { class: 'two' }, worstCard(), column(outputsCard(), values.steps ? stepsCard() : null)),
    h('div', { id: 'layers' }, chartCard(), detailsCard(), tableCard()),
    h('div', { class: 'two' }, column(npuCard(), timesCard(), notesCard()), column(recipeCard())),
  ],
);
document.getElementById('head').after(h('nav', { 'aria-label': 'Sections' }, h('ul', {},
  SECTIONS.filter(([id]) => document.getElementById(id)).map(([id, title]) => h('li', {}, h('a', { href: `#${id}` }, title))))));
document.getElementById('foot').append(
  h('p', {}, Object.entries(values.versions).map(([name, version]) => `${name} ${version}`).join(' · ')),
);
document.documentElement.dataset.ready = 'yes';
