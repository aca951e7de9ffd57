// One replica's blocks as a grid of cells: a cell is a block or, of a large pool, several.

const FREE = 0, CACHED = 1, SHARED = 2, FIRST_REQUEST = 3;
const CELL = 9, GAP = 2, MOST_CELLS = 900;

export class BlockMap {
  constructor(parent, note) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = "map";
    this.canvas.setAttribute("role", "img");
    parent.append(this.canvas);
    this.note = note;
    this.canvas.addEventListener("pointermove", (event) => this.tell(event));
    this.canvas.addEventListener("pointerleave", () => { note.textContent = ""; });
  }

  show(replica, index) {
    this.replica = replica;
    const kinds = replica.blocks.flatMap(([kind, count]) => Array(count).fill(kind));
    this.perCell = Math.ceil(kinds.length / MOST_CELLS);
    this.cells = [];
    for (let i = 0; i < kinds.length; i += this.perCell) {
      // Of several blocks the rarest kind is shown: what is used stands out.
      this.cells.push(Math.max(...kinds.slice(i, i + this.perCell)));
    }
    const name = index === null ? "Blocks" : `Blocks of replica ${index}`;
    this.canvas.setAttribute("aria-label", `${name}: ${replica.num_used} used, ${replica.num_cached} cached, ${replica.num_free} free of ${replica.num_blocks}`);
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const step = CELL + GAP;
    this.columns = Math.max(1, Math.floor((width + GAP) / step));
    const rows = Math.ceil(this.cells.length / this.columns);
    const scale = devicePixelRatio || 1;
    const stretch = (width + GAP) / (this.columns * step);
    this.step = step * stretch;
    const height = Math.ceil(rows * this.step);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const light = style.getPropertyValue("--light").trim();
    const named = { [FREE]: "--free", [CACHED]: "--cached", [SHARED]: "--shared" };
    const size = this.step - GAP;
    this.cells.forEach((kind, i) => {
      pen.fillStyle = kind < FIRST_REQUEST
        ? style.getPropertyValue(named[kind])
        : `hsl(${this.replica.requests[kind - FIRST_REQUEST]?.hue ?? 0} 52% ${light})`;
      pen.beginPath();
      pen.roundRect((i % this.columns) * this.step, Math.floor(i / this.columns) * this.step, size, size, 2.5);
      pen.fill();
    });
  }

  tell(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.step);
    const cell = Math.floor((event.clientY - box.top) / this.step) * this.columns + column;
    const kind = this.cells?.[cell];
    if (kind === undefined) return;
    const names = ["free", "cached", "shared by several requests"];
    const owner = names[kind] ?? `of ${this.replica.requests[kind - FIRST_REQUEST]?.label ?? "a request"}`;
    const first = cell * this.perCell + 1;
    const last = Math.min(first + this.perCell - 1, this.replica.num_blocks);
    this.note.textContent = `${first === last ? `Block ${first}` : `Blocks ${first} to ${last}`}: ${owner}`;
  }
}
