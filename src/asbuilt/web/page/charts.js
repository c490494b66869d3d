// Charts of points that the server computed, in SVG, on logarithmic axes.
import { el } from "./dom.js";

const HEIGHT = 270, LEFT = 62, RIGHT = 16, TOP = 14, BOTTOM = 42;
const WIDE = 560, NARROW = 340; // on a phone the text keeps its size
const APART = 34; // between the texts of an axis

function decades(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const steps = to - from <= 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((to - from) / 7));
  const found = [];
  for (let power = from; power <= to; power += every) for (const step of steps) found.push(step * 10 ** power);
  const fitting = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return fitting.length ? fitting : [low, high];
}

const scale = (low, high, from, to) => (value) => {
  const share = high === low ? 0.5 : Math.log(value / low) / Math.log(high / low);
  return from + (to - from) * Math.min(1, Math.max(0, share));
};

// `series`: {class, points: [[x, y]], dots}; `marks`: {x, y, name, class, below}; `band`: points around an area.
export function chart({ title, description, x, y, series, marks = [], band = [] }) {
  const WIDTH = innerWidth < 500 ? NARROW : WIDE;
  const all = [...series.flatMap((one) => one.points), ...band, ...marks.map((mark) => [mark.x, mark.y])].filter(([a, b]) => a > 0 && b > 0);
  const drawn = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${description}` });
  if (!all.length) return el("p", { class: "note" }, "nothing to draw");
  const [xs, ys] = [0, 1].map((i) => all.map((point) => point[i]));
  const room = (values, low, high) => [Math.min(...values) * low, Math.max(...values) * high];
  const [left, right] = room(xs, 0.85, 1.18), [low, high] = room(ys, 0.7, 1.45);
  const across = scale(left, right, LEFT, WIDTH - RIGHT), up = scale(low, high, HEIGHT - BOTTOM, TOP);
  for (const value of decades(low, high)) {
    const at = up(value);
    drawn.append(el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }),
      el("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, y.text(value)));
  }
  let last = -APART;
  for (const value of x.ticks ?? decades(left, right)) {
    const at = across(value);
    drawn.append(el("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (at - last < APART) continue;
    drawn.append(el("text", { x: at, y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, x.text(value)));
    last = at;
  }
  drawn.append(el("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    el("text", { class: "name", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, x.name),
    el("text", { class: "name", transform: `translate(12 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.name));
  if (band.length) drawn.append(el("polygon", { class: "band", points: band.map(([a, b]) => `${across(a)},${up(b)}`).join(" ") }));
  for (const one of series) {
    const points = one.points.filter(([a, b]) => a > 0 && b > 0);
    drawn.append(el("polyline", { class: one.class, points: points.map(([a, b]) => `${across(a)},${up(b)}`).join(" ") }));
    points.forEach(([a, b], i) => one.dots && drawn.append(
      el("circle", { class: one.dots[i]?.class ?? "dot", cx: across(a), cy: up(b), r: 3.5 }, el("title", {}, one.dots[i]?.text ?? ""))));
  }
  for (const mark of marks.filter((one) => one.x > 0 && one.y > 0)) {
    const at = [across(mark.x), up(mark.y)], end = at[0] > WIDTH * 0.62;
    drawn.append(mark.square
      ? el("rect", { class: mark.class ?? "dot b", x: at[0] - 5, y: at[1] - 5, width: 10, height: 10 })
      : el("circle", { class: mark.class ?? "dot b", cx: at[0], cy: at[1], r: 5 }));
    drawn.append(el("text", { class: "name", x: at[0] + (end ? -9 : 9), y: at[1] + (mark.below ? 18 : -8), "text-anchor": end ? "end" : "start" }, mark.name));
  }
  return drawn;
}
