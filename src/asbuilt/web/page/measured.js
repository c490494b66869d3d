// The panel of `asbuilt measure`: what was predicted beside what was measured.
import { el } from "./dom.js";
import { bytes, count, digits, scaled, whole } from "./format.js";
import { cell, derived, head, panel, say, slug } from "./parts.js";

const WRITTEN = { bytes, FLOPs: (n) => scaled(n, "FLOP"), "tokens/s": (n) => `${digits(n, 4)} tokens/s`, "pairs/s": (n) => `${digits(n, 4)} pairs/s` };

function verdict(row) {
  const within = row.tolerance ? `within ${digits(row.tolerance * 100)}%` : "exact";
  return el("span", { class: row.ok ? "yes" : "no" }, row.ok ? `✓ ${within}` : `✗ not ${within}`);
}

export function measured(now, open) {
  const m = now.measure, machine = m.machine.machine ?? {};
  const rows = m.rows.flatMap((row) => {
    const text = WRITTEN[row.unit] ?? count;
    const error = row.error === null ? "–" : row.error === 0 ? "0" : `${row.error > 0 ? "+" : "−"}${digits(Math.abs(row.error) * 100)}%`;
    const exact = [row.predicted, row.measured].map((n) => (Number.isInteger(n) ? whole(n) : digits(n, 6)));
    return derived(row.figure, [cell(text(row.predicted)), cell(text(row.measured)), cell(error), el("td", {}, verdict(row))],
      say(`predicted ${exact[0]} ${row.unit}, measured ${exact[1]}`), { columns: 5, key: `measured-${slug(row.figure)}` });
  });
  const on = [`${m.model} in ${m.dtype}`, machine.processor && `${machine.processor}, ${machine.threads} threads`, m.native && `native kernels (${m.native})`].filter(Boolean).join(" · ");
  return panel("Predicted and measured", "measure", open, { wide: true, note: "Every figure is predicted from the description before it is measured. Speeds depend on what else the machine does." },
    el("p", {}, el("span", { class: m.ok ? "yes" : "no" }, m.ok ? "✓ As predicted" : "✗ A prediction missed"), ` ${on}`),
    el("div", { class: "scroll" }, el("table", {}, head(["figure"], ["predicted", "n"], ["measured", "n"], ["difference", "n"], [""]), el("tbody", {}, rows))),
    m.notes.map((note) => el("p", { class: "note" }, note)));
}
