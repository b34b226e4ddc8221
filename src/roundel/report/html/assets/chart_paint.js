// Layers and the lines between them, on a canvas: only what is in sight, and text only where it can be read.

class Painter {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.pen = canvas.getContext('2d');
    this.widths = new Map();
  }

  draw(scale, selected, hovered) {
    const { pen, view } = this;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(view.width * ratio);
    this.canvas.height = Math.round(view.height * ratio);
    this.colours = {
      line: cssColour('--strong-line'), ink: cssColour('--ink'), soft: cssColour('--soft'),
      card: cssColour('--card'), accent: cssColour('--accent'),
    };
    this.font = getComputedStyle(document.body).fontFamily;
    this.size = { width: BOX.width * view.scale, height: BOX.height * view.scaleY };
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.edges(selected);
    const [first, last] = view.columns();
    const seen = grid.byColumn.slice(first, last + 1).flat();
    for (const index of seen) this.box(index, scale, index === selected, index === hovered);
    if (scale.metric === 'introduced') {
      for (const index of seen) if (rankOf.has(index)) this.badge(index);
    }
  }

  edges(selected) {
    const { pen, view } = this;
    const [first, last] = view.columns();
    const near = new Path2D();
    const lines = new Path2D();
    layers.forEach((layer, index) => {
      for (const source of layer.from) {
        if (layers[source].at[0] > last || layer.at[0] < first) continue;
        this.edge(source === selected || index === selected ? near : lines, source, index);
      }
    });
    pen.strokeStyle = this.colours.line;
    pen.lineWidth = view.scale < ZOOM.letters ? 1 : 1.5;
    pen.stroke(lines);
    pen.strokeStyle = this.colours.accent;
    pen.lineWidth = view.scale < ZOOM.letters ? 1.5 : 2.5;
    pen.stroke(near);
  }

  // Neighbours: a straight line. A way around, on one lane: an arc above. Between lanes: along the lower one.
  edge(path, source, target) {
    const { view } = this;
    const [x1, x2] = [view.toX(leftOf(source) + BOX.width), view.toX(leftOf(target))];
    const [y1, y2] = [source, target].map((index) => view.toY(topOf(index) + BOX.height / 2));
    const span = layers[target].at[0] - layers[source].at[0];
    if (y1 === y2 && span > 1) {
      const top = view.toY(topOf(source));
      const up = top - (9 + Math.min(22, 4 * span)) * view.scaleY;
      const [out, near, far] = [16, 8, 22].map((part) => part * view.scale);
      path.moveTo(x1 - out, top);
      path.bezierCurveTo(x1 - near, up, x1 + near / 2, up, x1 + far, up);
      path.lineTo(x2 - far, up);
      path.bezierCurveTo(x2 - near / 2, up, x2 + near, up, x2 + out, top);
      return;
    }
    const turn = (BOX.stepX - BOX.width) * view.scale;
    path.moveTo(x1, y1);
    if (y2 > y1) {
      path.bezierCurveTo(x1 + turn * 0.7, y1, x1 + turn * 0.3, y2, x1 + turn, y2);
      path.lineTo(x2, y2);
    } else {
      path.lineTo(x2 - turn, y1);
      path.bezierCurveTo(x2 - turn * 0.3, y1, x2 - turn * 0.7, y2, x2, y2);
    }
  }

  box(index, scale, selected, hovered) {
    const { pen, view, colours, size } = this;
    const layer = layers[index];
    const [x, y] = [view.toX(leftOf(index)), view.toY(topOf(index))];
    const severity = scale.severity(layer[scale.metric]);
    const exact = severity === null || number(layer[scale.metric]) === Infinity;
    const [fill, ink] = exact ? [colours.card, colours.ink] : paint(severity);
    const outline = new Path2D();
    outline.roundRect(x, y, size.width, size.height, Math.min(8 * view.scale, size.width / 3));
    pen.fillStyle = fill;
    pen.fill(outline);
    if (!exact && size.width > 14) this.meter(x, y, severity, ink);
    if (layer.runs === 'cpu') this.hatch(outline, x, y, ink);
    if (selected || hovered || size.width > 4) {
      pen.strokeStyle = selected ? colours.accent : hovered ? colours.ink : colours.line;
      pen.lineWidth = selected ? 3 : 1.2;
      pen.setLineDash(layer.stored === null ? [5, 4] : []);
      pen.stroke(outline);
      pen.setLineDash([]);
    }
    if (view.scale >= ZOOM.letters) this.letters(layer, x, y, ink, db(layer[scale.metric]));
  }

  // A bar whose length is the error: the second cue beside colour.
  meter(x, y, severity, ink) {
    const { pen, view, size } = this;
    const [inset, high] = [10 * view.scale, 4 * view.scaleY];
    const top = y + size.height - 9 * view.scaleY;
    pen.fillStyle = ink;
    pen.globalAlpha = 0.22;
    pen.fillRect(x + inset, top, size.width - 2 * inset, high);
    pen.globalAlpha = 0.9;
    pen.fillRect(x + inset, top, (size.width - 2 * inset) * severity, high);
    pen.globalAlpha = 1;
  }

  hatch(outline, x, y, ink) {
    const { pen, size } = this;
    pen.save();
    pen.clip(outline);
    pen.strokeStyle = ink;
    pen.globalAlpha = 0.3;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (let at = -size.height; at < size.width; at += 8) {
      pen.moveTo(x + at, y + size.height);
      pen.lineTo(x + at + size.height, y);
    }
    pen.stroke();
    pen.restore();
  }

  letters(layer, x, y, ink, figure) {
    const { pen, view, colours, size } = this;
    const k = view.scale;
    pen.textBaseline = 'alphabetic';
    pen.fillStyle = ink;
    pen.font = `600 ${13 * k}px ${this.font}`;
    pen.textAlign = 'right';
    pen.fillText(figure, x + size.width - 10 * k, y + 22 * k);
    const room = size.width - 30 * k - this.width(figure);
    pen.textAlign = 'left';
    pen.fillText(this.cut(layer.op, room, false), x + 10 * k, y + 22 * k);
    if (k >= ZOOM.names) {
      pen.font = `${11 * k}px ${this.font}`;
      pen.fillStyle = colours.soft;
      pen.fillText(this.cut(layer.name, (BOX.stepX - 12) * k, true), x + 2 * k, y + size.height + 15 * k);
    }
  }

  badge(index) {
    const { pen, view, colours, size } = this;
    const x = view.toX(leftOf(index)) + Math.min(2, size.width / 2);
    const y = view.toY(topOf(index)) + (size.width < 20 ? -10 : 2);
    pen.beginPath();
    pen.arc(x, y, 10, 0, 2 * Math.PI);
    pen.fillStyle = colours.ink;
    pen.fill();
    pen.fillStyle = colours.card;
    pen.font = `700 12px ${this.font}`;
    pen.textAlign = 'center';
    pen.textBaseline = 'middle';
    pen.fillText(rankOf.get(index), x, y + 0.5);
  }

  // Measuring is slow; most texts come again.
  width(text) {
    const key = `${this.pen.font}|${text}`;
    if (!this.widths.has(key)) {
      if (this.widths.size > 20000) this.widths.clear();
      this.widths.set(key, this.pen.measureText(text).width);
    }
    return this.widths.get(key);
  }

  // Shortened to fit: names keep their end, operators their beginning.
  cut(text, room, keepEnd) {
    if (this.width(text) <= room) return text;
    let [low, high] = [0, text.length];
    const cutTo = (count) => (keepEnd ? '…' + text.slice(text.length - count) : text.slice(0, count) + '…');
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.width(cutTo(middle)) <= room) low = middle;
      else high = middle - 1;
    }
    return cutTo(low);
  }
}
