// The panels of the model itself: parameters by kind, its tree, and a token's way through a block.
import { el } from "./dom.js";
import { bytes, count, difference, scaled, whole } from "./format.js";
import { cell, derived, head, panel, say } from "./parts.js";

export function parameters(now, before, open) {
  const d = now.describe, kinds = Object.entries(d.parameters).filter(([name, n]) => n && name !== "total" && name !== "active");
  const most = Math.max(...kinds.map(([, n]) => n));
  const rows = kinds.flatMap(([name, n]) => derived(name, [cell(count(n)), before ? cell(difference(before.describe.parameters[name], n)) : null,
    el("td", { class: "bars", "aria-hidden": "true" }, el("span", { class: "bar", "width%": (100 * n) / most }))],
  say(`${whole(n)} exactly`, d.conventions.parameters), { columns: before ? 4 : 3, key: `kind-${name}`, moved: before && before.describe.parameters[name] !== n }));
  const formats = ["bf16", "fp8", "int8", "int4", "q4_k"].filter((name) => d.weight_bytes[name]).map((name) => `${name} ${bytes(d.weight_bytes[name])}`);
  return panel("Parameters by kind", "describe", open, { note: `Weights of the whole model: ${formats.join(" · ")}` },
    el("table", {}, head(["kind"], ["parameters", "n"], ...(before ? [["change", "n"]] : []), [""]), el("tbody", {}, rows)));
}

export function tree(now, open) {
  const rows = now.describe.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, row.path)), el("td", {}, row.part), cell(whole(row.count)),
    cell(count(row.parameters)), cell(row.flops_per_token ? scaled(row.flops_per_token, "") : "–"), cell(row.cache_bytes_per_token ? bytes(row.cache_bytes_per_token) : "–")));
  return panel("The model's tree", "describe", open, { wide: true, note: "Figures of one part; a path such as blocks.0-31 stands for as many equal ones as “count” says." },
    el("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "parts by path" }, el("table", { class: "tree" }, head(["path"], ["part"], ["count", "n"], ["parameters", "n"], ["FLOPs/token", "n"], ["cache/token", "n"]), el("tbody", {}, rows))));
}

const shape = (numbers) => (numbers ? numbers.map(whole).join(" × ") : "");

export function steps(now, open) {
  const kinds = now.describe.shapes.map((kind) => {
    const at = kind.blocks.length ? `block ${kind.blocks[0]}${kind.count > 1 ? ` and ${whole(kind.count - 1)} like it` : ""}` : "";
    const rows = kind.steps.map((step) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, step.path)), el("td", {}, step.step), cell(shape(step.input)), cell(shape(step.by)), cell(shape(step.output)), cell(step.flops ? scaled(step.flops, "") : "–")));
    return el("details", { open: kind === now.describe.shapes[0] }, el("summary", {}, `${kind.path}: ${at}`),
      el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `steps of ${at}` }, el("table", { class: "tree" }, head(["path"], ["step"], ["in", "n"], ["by", "n"], ["out", "n"], ["FLOPs", "n"]), el("tbody", {}, rows))));
  });
  return kinds.length ? panel("A token's way through a block", "describe", open, { wide: true, note: `With ${whole(now.describe.shapes[0].seq)} tokens in view.` }, kinds) : null;
}
