// Where things are: layers on a grid, and the part of it that the canvas shows.

const BOX = { width: 128, height: 44, stepX: 160, stepY: 74 };
const ZOOM = { least: 0.004, most: 2.5, flattest: 0.42, letters: 0.5, names: 0.85 };

const grid = {
  columns: layers.reduce((most, layer) => Math.max(most, layer.at[0]), 0) + 1,
  lanes: layers.reduce((most, layer) => Math.max(most, layer.at[1]), 0) + 1,
  byColumn: [],
  readers: layers.map(() => []),
};
layers.forEach((layer, index) => {
  (grid.byColumn[layer.at[0]] ||= []).push(index);
  for (const source of layer.from) grid.readers[source].push(index);
});

const leftOf = (index) => layers[index].at[0] * BOX.stepX;
const topOf = (index) => layers[index].at[1] * BOX.stepY;

// Screen = world * scale + offset, in CSS pixels. Zoomed out, boxes grow narrow but stay tall enough to be seen:
// a long network becomes a band of bars, lane by lane.
class View {
  constructor() {
    Object.assign(this, { width: 1, height: 1, scale: 1, x: 0, y: 0 });
  }

  resize(width, height) {
    this.width = Math.max(1, width);
    this.height = Math.max(1, height);
  }

  get scaleY() {
    return Math.max(this.scale, ZOOM.flattest);
  }

  toX(x) {
    return x * this.scale + this.x;
  }

  toY(y) {
    return y * this.scaleY + this.y;
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const scale = Math.min(ZOOM.most, Math.max(ZOOM.least, this.scale * factor));
    const beforeY = this.scaleY;
    this.x = x - (x - this.x) * (scale / this.scale);
    this.scale = scale;
    this.y = y - (y - this.y) * (this.scaleY / beforeY);
    this.keepInside();
  }

  pan(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.keepInside();
  }

  // The graph never leaves the canvas altogether; what fits stands in the middle.
  keepInside() {
    const wide = (grid.columns - 1) * BOX.stepX + BOX.width;
    const tall = (grid.lanes - 1) * BOX.stepY + BOX.height;
    const hold = (offset, size, room, margin) => {
      if (size + 2 * margin <= room) return (room - size) / 2;
      return Math.min(margin, Math.max(room - size - margin, offset));
    };
    this.x = hold(this.x, wide * this.scale, this.width, 24);
    this.y = hold(this.y, tall * this.scaleY, this.height, 44);
  }

  centre(index) {
    this.x = this.width / 2 - (leftOf(index) + BOX.width / 2) * this.scale;
    this.y = this.height / 2 - (topOf(index) + BOX.height / 2) * this.scaleY;
    this.keepInside();
  }

  fit() {
    const wide = (grid.columns - 1) * BOX.stepX + BOX.width;
    this.scale = Math.max(ZOOM.least, Math.min(1, (this.width - 48) / wide));
    this.keepInside();
  }

  sees(index) {
    const [x, y] = [this.toX(leftOf(index)), this.toY(topOf(index))];
    return x >= 0 && y >= 0 && x + BOX.width * this.scale <= this.width && y + BOX.height * this.scaleY <= this.height;
  }

  // First and last column on the canvas.
  columns() {
    const first = Math.floor(-this.x / this.scale / BOX.stepX) - 1;
    const last = Math.ceil((this.width - this.x) / this.scale / BOX.stepX);
    return [Math.max(0, first), Math.min(grid.columns - 1, last)];
  }

  layerAt(x, y) {
    const wx = (x - this.x) / this.scale;
    const wy = (y - this.y) / this.scaleY;
    const column = Math.floor(wx / BOX.stepX);
    const hit = (grid.byColumn[column] || []).find(
      (index) => wx - leftOf(index) <= BOX.width && wy >= topOf(index) && wy <= topOf(index) + BOX.height,
    );
    return hit === undefined ? null : hit;
  }
}
