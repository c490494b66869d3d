// What panels are made of: tables whose names open derivations, and the frame around them.
import { el, fresh } from "./dom.js";
import { bytes, difference, plain, seconds } from "./format.js";

export const cell = (text, kind = "n") => el("td", { class: kind }, text);
export const head = (...names) => el("thead", {}, el("tr", {}, names.map(([text, kind]) => (text ? el("th", { class: kind ?? "", scope: "col" }, text) : el("td", { class: kind ?? "" })))));

export function panel(title, document, open, { wide = false, note = "" } = {}, ...children) {
  const id = fresh();
  const button = document && el("button", { type: "button", "aria-label": `JSON of ${title}`, on: { click: () => open(title, document) } }, "JSON");
  return el("section", { class: wide ? "wide" : "", "aria-labelledby": id },
    el("div", { class: "row" }, el("h2", { id }, title), button), ...children, note && el("p", { class: "note" }, note));
}

// A row whose name opens what stands behind the figure.
export function derived(name, cells, behind, { columns, total = false, moved = false, key = "" }) {
  const kind = [total && "total", moved && "moved"].filter(Boolean).join(" ");
  if (!behind.length) return [el("tr", { class: kind, "data-figure": key }, el("th", { scope: "row" }, name), cells)];
  const id = fresh();
  const more = el("tr", { class: "derivation", id, hidden: true }, el("td", { colspan: columns }, behind));
  const toggle = ({ currentTarget }) => {
    more.hidden = !more.hidden;
    currentTarget.setAttribute("aria-expanded", String(!more.hidden));
  };
  const button = el("button", { type: "button", class: "open", "aria-expanded": "false", "aria-controls": id, on: { click: toggle } }, name);
  return [el("tr", { class: kind, "data-figure": key }, el("th", { scope: "row" }, button), cells), more];
}

export function behindLine(line) {
  const numbers = Object.entries(line.numbers ?? {});
  return [
    line.formula && el("div", {}, el("code", {}, line.formula)),
    numbers.length ? el("dl", {}, numbers.map(([name, value]) => [el("dt", {}, name), el("dd", {}, plain(value))])) : "",
    line.note && el("div", {}, line.note),
    line.source && el("div", {}, `source: ${line.source}`),
  ].filter(Boolean);
}

export const say = (...texts) => texts.filter(Boolean).map((text) => el("div", {}, text));

export const slug = (name) => name.toLowerCase().replaceAll(/[^a-z]+/g, "-");

export function ladder(lines, { old, total, key }) {
  const columns = old ? 4 : 3, largest = Math.max(...lines.map((line) => Math.abs(line.bytes)), 1);
  return lines.flatMap((line, i) => {
    const was = old?.find((one) => one.line === line.line)?.bytes;
    const cells = [cell(bytes(line.bytes)), old ? cell(difference(was, line.bytes)) : null,
      el("td", { class: "bars", "aria-hidden": "true" }, el("span", { class: "bar", "width%": (100 * Math.max(0, line.bytes)) / largest }))];
    return derived(line.line, cells, behindLine(line), { columns, total: total && i === lines.length - 1, moved: old && was !== line.bytes, key: `${key}-${slug(line.line)}` });
  });
}

// A table of rows of name, value, how it is written, and what stands behind it; `was` are the same rows before.
export function compared(rows, was, key, title = "") {
  const names = was ? [[title], ["before", "n"], ["now", "n"], ["change", "n"]] : [[title], ["value", "n"]];
  const written = rows.flatMap(([name, value, text, ...behind], i) => {
    const old = was?.[i]?.[1];
    const cells = was ? [cell(old === undefined || old === null ? "–" : text(old)), cell(text(value)), cell(difference(old, value))] : [cell(text(value))];
    return derived(name, cells, say(...behind), { columns: was ? 4 : 2, key: `${key}-${slug(name)}`, moved: was && old !== value });
  });
  return el("div", { class: "scroll" }, el("table", {}, head(...names), el("tbody", {}, written)));
}

export const range = ({ low, high }, of = (one) => one, text = seconds) => `from ${text(of(high))} to ${text(of(low))} with high and low efficiencies`;

// Devices of a serving plan, of both pools where prompts have their own.
export const devices = ({ disaggregated, layout }) => (disaggregated ?? layout).gpus;

// A button that the page hears; a file has nobody to listen, and hides it.
export const use = (where, values, name) =>
  el("td", { class: "use" }, el("button", { type: "button", "aria-label": `Use ${name}`, on: { click: ({ currentTarget }) => currentTarget.dispatchEvent(new CustomEvent("use", { bubbles: true, detail: { where, values } })) } }, "Use"));
