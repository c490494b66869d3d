// The panels: each is drawn from the documents of the command line, `now` and, where the model is changed, `before`.
import { chart } from "./charts.js";
import { el, fresh } from "./dom.js";
import { bytes, count, difference, digits, plain, scaled, seconds, whole } from "./format.js";

const cell = (text, kind = "n") => el("td", { class: kind }, text);
const head = (...names) => el("thead", {}, el("tr", {}, names.map(([text, kind]) => (text ? el("th", { class: kind ?? "", scope: "col" }, text) : el("td")))));

export function panel(title, document, open, { wide = false, note = "" } = {}, ...children) {
  const id = fresh();
  const button = document && el("button", { type: "button", "aria-label": `JSON of ${title}`, on: { click: () => open(title, document) } }, "JSON");
  return el("section", { class: wide ? "wide" : "", "aria-labelledby": id },
    el("div", { class: "row" }, el("h2", { id }, title), button), ...children, note && el("p", { class: "note" }, note));
}

// A row whose name opens what stands behind the figure.
function derived(name, cells, behind, { columns, total = false, moved = false, key = "" }) {
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

function behindLine(line) {
  const numbers = Object.entries(line.numbers ?? {});
  return [
    line.formula && el("div", {}, el("code", {}, line.formula)),
    numbers.length ? el("dl", {}, numbers.map(([name, value]) => [el("dt", {}, name), el("dd", {}, plain(value))])) : "",
    line.note && el("div", {}, line.note),
    line.source && el("div", {}, `source: ${line.source}`),
  ].filter(Boolean);
}

const say = (...texts) => texts.filter(Boolean).map((text) => el("div", {}, text));

// Name, where in the documents, how it is written, and what stands behind it.
function figures({ describe: d, serve: s, train: t }) {
  const c = d?.conventions ?? {}, e = s?.expected;
  const range = (name, text) => (e?.low?.[name] ? [`expected; from ${text(e.low[name])} to ${text(e.high[name])} with low and high efficiencies`,
    ...Object.entries(e.sources ?? {}).map(([what, source]) => `${what}: ${source}`)] : []);
  return [
    ["parameters", d?.parameters.total, count, say(c.parameters, d && `${whole(d.parameters.total)} exactly`)],
    ["active per token", d?.parameters.active, count, say(c.active_parameters)],
    ["weights", s?.weight_bytes, bytes, say(`in ${s?.dtype}, on one device`, c.weights)],
    ["cache per token", d?.cache.bytes_per_token, bytes, say(`in ${d?.cache.dtype}, of layers that grow with the context`, c.cache)],
    ["forward FLOPs per token", d?.flops.forward_per_token, (n) => scaled(n, ""), say(c.flops, c.scores, d && `averaged over ${whole(d.flops.seq)} tokens`)],
    ["users", s?.users, whole, say(s && `at ${whole(s.context)} tokens each; memory alone allows ${whole(s.users_that_fit ?? 0)}`)],
    ["tokens in the cache", s?.cache_tokens, whole, []],
    ["largest context", s?.largest_context, whole, say("for the users that were asked for, within the model's")],
    ["first token", e?.middle?.prefill_seconds, seconds, say(s && `prompt of ${whole(s.prefill.prompt)}; theoretical minimum ${seconds(s.prefill.seconds)}, ${s.prefill.bound}-bound`, ...range("prefill_seconds", seconds))],
    ["time per token", e?.middle?.seconds_per_step, seconds, say(s?.decode && `batch of ${whole(s.decode.batch)}; theoretical minimum ${seconds(s.decode.seconds_per_step)}, ${s.decode.bound}-bound`, ...range("seconds_per_step", seconds))],
    ["tokens/s, all users", e?.middle?.tokens_per_second, (n) => digits(n, 4), say(s?.decode && `theoretical maximum ${digits(s.decode.tokens_per_second, 4)}`, ...range("tokens_per_second", (n) => digits(n, 4)))],
    ["training, per device", t?.per_device_bytes, bytes, say(t?.conventions.per_device_bytes)],
    ["training step", t?.step.seconds, seconds, say(t?.conventions.step)],
    ["training days", t?.days, digits, say(t?.conventions.days, t && `${scaled(t.tokens, "")} tokens`)],
  ];
}

const slug = (name) => name.toLowerCase().replaceAll(/[^a-z]+/g, "-");

export function answer(now, before, open) {
  const rows = figures(now), old = before && figures(before);
  const columns = old ? 4 : 2;
  const body = rows.flatMap(([name, value, text, behind], i) => {
    if (value === undefined || value === null) return [];
    const was = old?.[i][1];
    const cells = old ? [cell(was === undefined || was === null ? "–" : text(was)), cell(text(value)), cell(difference(was, value))] : [cell(text(value))];
    return derived(name, cells, behind, { columns, key: slug(name), moved: old && was !== value });
  });
  const names = old ? [["figure"], ["before", "n"], ["now", "n"], ["change", "n"]] : [["figure"], ["value", "n"]];
  const s = now.serve;
  const fits = s && s.fits !== null && el("p", {}, el("span", { class: s.fits ? "yes" : "no" }, s.fits ? "✓ It fits" : "✗ It does not fit"),
    ` on ${whole(s.layout.gpus)} × ${s.machine}, in ${s.dtype}, cache in ${s.kv_dtype}`);
  const change = s?.suggestions?.length ? el("p", { class: "note" }, `What to change: ${s.suggestions.slice(0, 3).map((one) => `${one.option} (${one.effect})`).join("; ")}`) : "";
  return panel("Figures", s ? "serve" : "describe", open, { note: "A name opens its derivation. Speeds are expected ones; the minimum and the range stand behind them." },
    fits, change, el("div", { class: "scroll" }, el("table", {}, head(...names), el("tbody", {}, body))));
}

export function parameters(now, before, open) {
  const d = now.describe, kinds = Object.entries(d.parameters).filter(([name, n]) => n && name !== "total" && name !== "active");
  const most = Math.max(...kinds.map(([, n]) => n));
  const rows = kinds.map(([name, n]) => el("tr", {}, el("th", { scope: "row" }, name), cell(count(n)),
    before ? cell(difference(before.describe.parameters[name], n)) : null,
    el("td", { class: "bars", "aria-hidden": "true" }, el("span", { class: "bar", "width%": (100 * n) / most }))));
  const formats = ["bf16", "fp8", "int8", "int4", "q4_k"].filter((name) => d.weight_bytes[name]).map((name) => `${name} ${bytes(d.weight_bytes[name])}`);
  return panel("Parameters by kind", "describe", open, { note: `Weights of the whole model: ${formats.join(" · ")}` },
    el("table", {}, head(["kind"], ["parameters", "n"], ...(before ? [["change", "n"]] : []), [""]), el("tbody", {}, rows)));
}

function ladder(lines, { old, total, key }) {
  const columns = old ? 4 : 3, largest = Math.max(...lines.map((line) => Math.abs(line.bytes)), 1);
  return lines.flatMap((line, i) => {
    const was = old?.find((one) => one.line === line.line)?.bytes;
    const cells = [cell(bytes(line.bytes)), old ? cell(difference(was, line.bytes)) : null,
      el("td", { class: "bars", "aria-hidden": "true" }, el("span", { class: "bar", "width%": (100 * Math.max(0, line.bytes)) / largest }))];
    return derived(line.line, cells, behindLine(line), { columns, total: total && i === lines.length - 1, moved: old && was !== line.bytes, key: `${key}-${slug(line.line)}` });
  });
}

export function memory(now, before, open) {
  const rows = ladder(now.serve.ladder, { old: before?.serve?.ladder, total: true, key: "memory" });
  return panel("Memory of one device", "serve", open, { note: "From the device's memory down to what is left for the cache. A name opens its formula, numbers and source." },
    el("div", { class: "scroll" }, el("table", {}, head(["line"], ["bytes", "n"], ...(before ? [["change", "n"]] : []), [""]), el("tbody", {}, rows))));
}

const flops = (n) => scaled(n, "FLOP/s");

export function roofline(now, before, open) {
  const r = now.curves.roofline, points = r.points.filter((one) => one.intensity);
  const xs = [...points.map((one) => one.intensity), r.ridge];
  const from = Math.min(...xs) / 4, to = Math.max(...xs) * 4;
  const roof = [[from, from * r.bandwidth], [r.ridge, r.rate], [to, r.rate]];
  const old = before?.curves?.roofline.points.filter((one) => one.intensity) ?? [];
  const marks = [
    ...old.map((one, i) => ({ x: one.intensity, y: one.flops_per_second, name: "", class: i ? "ring" : "hollow", square: i > 0 })),
    ...points.map((one, i) => ({ x: one.intensity, y: one.flops_per_second, name: one.name, class: i ? "dot b" : "dot", square: i > 0, below: true })),
  ];
  const told = points.map((one) => `${one.name}: ${digits(one.intensity)} FLOPs per byte, ${flops(one.flops_per_second)}, ${one.bound}-bound`).join("; ");
  const ridge = `${scaled(r.bandwidth, "B/s")} and ${flops(r.rate)} in ${r.precision} meet at ${digits(r.ridge)} FLOPs per byte`;
  return panel("Roofline", "curves", open, { note: `${ridge}. ${told}.${old.length ? " Hollow: before." : ""}` },
    chart({ title: "Roofline", description: told, x: { name: "FLOPs per byte moved", text: (n) => digits(n) }, y: { name: "FLOP/s of one device", text: (n) => scaled(n, "") },
      series: [{ class: "curve", points: roof }], marks }));
}

export function users(now, before, open) {
  const points = now.curves.users, s = now.serve, old = before?.curves?.users;
  const table = points.map((one) => [one.context, one.users]);
  const series = [...(old ? [{ class: "before", points: old.map((one) => [one.context, one.users]) }] : []),
    { class: "curve", points: table, dots: points.map((one) => ({ text: `${whole(one.context)} tokens: ${whole(one.users)} users` })) }];
  const last = points.at(-1);
  const told = `${whole(points[0].users)} users at ${whole(points[0].context)} tokens, ${whole(last.users)} at ${whole(last.context)}`;
  const none = points.find((one) => one.users === 0);
  return panel("Users against context", "curves", open, { note: `${told}.${none ? ` None from ${whole(none.context)} on.` : ""}${old ? " Dashed: before." : ""}` },
    chart({ title: "Users against context", description: told, x: { name: "tokens per user", text: (n) => (n >= 1024 ? `${digits(n / 1024)}K` : whole(n)), ticks: points.filter((_, i) => i % Math.ceil(points.length / 8) === 0).map((one) => one.context) },
      y: { name: "users", text: whole }, series, marks: [{ x: s.context, y: s.users, name: `${whole(s.users)} at ${whole(s.context)}`, class: "dot b", square: true, below: true }] }));
}

export function speed(now, before, open) {
  const sweep = now.serve.sweep, old = before?.serve?.sweep, fitting = now.serve.users_that_fit ?? 0;
  const at = (one) => [one.tokens_per_second_per_user, one.tokens_per_second];
  const dots = sweep.map((one) => ({ class: one.batch <= fitting ? "dot" : "hollow", text: `batch ${one.batch}: ${digits(one.tokens_per_second, 4)} tokens/s, ${digits(one.tokens_per_second_per_user, 4)} per user${one.batch <= fitting ? "" : ", does not fit"}` }));
  const series = [...(old ? [{ class: "before", points: old.map(at) }] : []), { class: "curve", points: sweep.map(at), dots }];
  const d = now.serve.decode;
  const knee = now.serve.knee === null ? "memory-bound at every batch size" : `compute-bound from a batch of ${whole(now.serve.knee)}`;
  return panel("Throughput against speed per user", "serve", open, { note: `Batches of 1 to ${whole(sweep.at(-1).batch)}, theoretical maxima; filled: fits, hollow: does not. Decoding is ${knee}.${old ? " Dashed: before." : ""}` },
    chart({ title: "Throughput against speed per user", description: knee, x: { name: "tokens/s of one user", text: (n) => digits(n) }, y: { name: "tokens/s of all", text: (n) => scaled(n, "") },
      series, marks: d ? [{ x: d.tokens_per_second_per_user, y: d.tokens_per_second, name: `batch of ${whole(d.batch)}`, class: "dot b", square: true, below: true }] : [] }));
}

export function training(now, before, open) {
  const t = now.train, old = before?.train?.ladder, l = t.layout;
  const rows = ladder(t.ladder, { old, key: "training" });
  const total = derived("per device", [cell(bytes(t.per_device_bytes)), old ? cell(difference(before.train.per_device_bytes, t.per_device_bytes)) : null, cell("")], say(t.conventions.per_device_bytes), { columns: old ? 4 : 3, total: true, key: "training-per-device" });
  const time = Object.entries(t.step.breakdown_seconds).filter(([, s]) => s).map(([name, s]) => `${name} ${seconds(s)}`).join(", ");
  const layout = `${whole(t.gpus)} × ${t.gpu}: dp ${l.dp}, tp ${l.tp}, pp ${l.pp}, ep ${l.ep}, cp ${l.cp}, ZeRO ${l.zero}`;
  const run = el("table", {}, el("tbody", {}, [["one step", seconds(t.step.seconds), time], ["tokens/s", whole(t.step.tokens_per_second), `${whole(t.step.tokens)} tokens a step`],
    ["MFU, 6ND", `${digits(t.step.mfu["6ND"] * 100)}%`, t.conventions.mfu], ["days", digits(t.days, 4), `${count(t.tokens)} tokens`],
    ...(t.money === null ? [] : [["money", whole(t.money), "price × GPU-hours"]])].map(([name, value, how]) => el("tr", {}, el("th", { scope: "row" }, name), cell(value), el("td", { class: "note" }, how)))));
  const change = t.suggestions.length ? el("p", { class: "note" }, `What to change: ${t.suggestions.slice(0, 3).map((one) => `${one.change} (${one.effect})`).join("; ")}`) : "";
  return panel("Training plan", "train", open, { wide: true },
    el("p", {}, el("span", { class: t.fits ? "yes" : "no" }, t.fits ? "✓ It fits" : "✗ It does not fit"), ` on ${layout}`), change,
    el("div", { class: "halves" }, el("div", { class: "scroll" }, el("table", {}, head(["memory"], ["bytes", "n"], ...(old ? [["change", "n"]] : []), [""]), el("tbody", {}, rows, total))),
      el("div", { class: "scroll" }, run)));
}

export function tree(now, open) {
  const rows = now.describe.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, row.path)), el("td", {}, row.part), cell(whole(row.count)),
    cell(count(row.parameters)), cell(row.flops_per_token ? scaled(row.flops_per_token, "") : "–"), cell(row.cache_bytes_per_token ? bytes(row.cache_bytes_per_token) : "–")));
  return panel("The model's tree", "describe", open, { wide: true, note: "Figures of one part; a path such as blocks.0-31 stands for as many equal ones as “count” says." },
    el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "parts by path" }, el("table", { class: "tree" }, head(["path"], ["part"], ["count", "n"], ["parameters", "n"], ["FLOPs/token", "n"], ["cache/token", "n"]), el("tbody", {}, rows))));
}

const shape = (numbers) => (numbers ? numbers.map(whole).join(" × ") : "");

export function steps(now, open) {
  const kinds = now.describe.shapes.map((kind) => {
    const at = kind.blocks.length ? `block ${kind.blocks[0]}${kind.count > 1 ? ` and ${whole(kind.count - 1)} like it` : ""}` : "";
    const rows = kind.steps.map((step) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, step.path)), el("td", {}, step.step), cell(shape(step.input)), cell(shape(step.by)), cell(shape(step.output)), cell(step.flops ? scaled(step.flops, "") : "–")));
    return el("details", { open: kind === now.describe.shapes[0] }, el("summary", {}, `${kind.path}: ${at}`),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `steps of ${at}` }, el("table", { class: "tree" }, head(["path"], ["step"], ["in", "n"], ["by", "n"], ["out", "n"], ["FLOPs", "n"]), el("tbody", {}, rows))));
  });
  return kinds.length ? panel("A token's way through a block", "describe", open, { wide: true, note: `With ${whole(now.describe.shapes[0].seq)} tokens in view.` }, kinds) : null;
}
