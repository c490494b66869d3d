// The panels of training: memory by line and by rank, the step, days and money, and layouts.
import { el } from "./dom.js";
import { bytes, count, difference, digits, seconds, share, whole } from "./format.js";
import { cell, derived, head, ladder, panel, say, slug, use } from "./parts.js";

export function training(now, before, open) {
  const t = now.train, old = before?.train?.ladder, l = t.layout;
  const rows = ladder(t.ladder, { old, key: "training" });
  const total = derived("per device", [cell(bytes(t.per_device_bytes)), old ? cell(difference(before.train.per_device_bytes, t.per_device_bytes)) : null, cell("")], say(t.conventions.per_device_bytes), { columns: old ? 4 : 3, total: true, key: "training-ladder-total" });
  const counted = t.not_counted.length ? [t.fits ? "✓ What is counted fits" : "✗ What is counted does not fit", el("p", { class: "problem" }, `Not counted without a model: ${t.not_counted.join("; ")}`)] : [t.fits ? "✓ It fits" : "✗ It does not fit", ""];
  const layout = `${whole(t.gpus)} × ${t.gpu}: dp ${l.dp}, tp ${l.tp}, pp ${l.pp}, ep ${l.ep}, cp ${l.cp}, ZeRO ${l.zero}`;
  const was = before && running(before.train), columns = was ? 4 : 2;
  const run = running(t).flatMap(([name, value, text, ...behind], i) => {
    const cells = was ? [cell(text(was[i][1])), cell(text(value)), cell(difference(was[i][1], value))] : [cell(text(value))];
    return derived(name, cells, behind, { columns, key: `run-${slug(name)}`, moved: was && was[i][1] !== value });
  });
  const change = t.suggestions.length ? el("p", { class: "note" }, `What to change: ${t.suggestions.slice(0, 3).map((one) => `${one.change} (${one.effect})`).join("; ")}`) : "";
  return panel("Training plan", "train", open, { wide: true },
    el("p", {}, el("span", { class: t.fits ? "yes" : "no" }, counted[0]), ` on ${layout}`), counted[1], change,
    el("div", { class: "halves" }, el("div", { class: "scroll" }, el("table", {}, head(["memory"], ["bytes", "n"], ...(old ? [["change", "n"]] : []), [""]), el("tbody", {}, rows, total))),
      el("div", { class: "scroll" }, el("table", {}, was ? head(["run"], ["before", "n"], ["now", "n"], ["change", "n"]) : head(["run"], ["", "n"]), el("tbody", {}, run)))));
}

const listed = (found) => el("dl", {}, found.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));

// Name, value, how it is written, and what is behind it.
function running(t) {
  // as the command line has it: a kernel efficiency, or a number of parameters alone, gives a lower bound
  const floor = (t.options.kernel_efficiency !== null || t.not_counted.length) && t.options.utilisation === null ? ", at least" : "";
  const parts = Object.entries(t.step.breakdown_seconds).filter(([, s]) => s).map(([name, s]) => [name, seconds(s)]);
  const sent = Object.entries(t.communication).filter(([, one]) => one.bytes).map(([name, one]) => `${name} sends ${bytes(one.bytes)} in ${seconds(one.seconds)} on the link: ${one.formula}`);
  const c = t.conventions, run = t.published_run, [mfu] = Object.entries(t.step.mfu); // with adapters 6ND says nothing
  return [
    [`one step${floor}`, t.step.seconds, seconds, listed(parts), ...say(c.step, ...sent)],
    [`${t.unit}/s`, t.step.tokens_per_second, whole, ...say(`${whole(t.step.tokens)} ${t.unit} a step`, c.batch)],
    [`MFU, ${mfu[0]}`, mfu[1], share, listed(Object.entries(t.step.mfu).map(([name, part]) => [name, share(part)])), ...say(c.mfu)],
    [`days${floor}`, t.days, (n) => digits(n, 4), ...say(`${count(t.tokens)} ${t.unit}`, c.days)],
    [`GPU hours${floor}`, t.gpu_hours, whole, ...say(c.gpu_hours)],
    ["at a published utilisation", run.gpu_hours, whole, ...say(`GPU hours at the ${share(run.mfu)} of all of ${run.name}`, run.source)],
    ...(t.money === null ? [] : [["money", t.money, whole, ...say(`${digits(t.options.price, 4)} for a GPU-hour`)]]),
  ];
}

const PIECES = [["state", "weights, gradients and optimizer"], ["gathered", "gathered weights, gradients before they are scattered"], ["activations", "activations of the micro-batches in flight"], ["in_flight", "of so many"], ["working", "outside the blocks, and temporary tensors"]];

export function ranks(now, open) {
  const { stages, memory, usable } = now.ranks, most = Math.max(memory, ...stages.map((one) => one.bytes));
  const rows = stages.flatMap((one) => derived(`stage ${one.stage}`, [cell(whole(one.ranks)), cell(bytes(one.bytes)),
    el("td", { class: "bars", "aria-hidden": "true" }, el("span", { class: one.bytes <= usable ? "bar" : "bar over", "width%": (100 * one.bytes) / most })), el("td", {}, one.bytes <= usable ? "✓ fits" : "✗ over")],
  [listed([...PIECES.map(([key, name]) => [name, key === "in_flight" ? digits(one[key]) : bytes(one[key])]), ...(one.on_host ? [["of it in host memory, not counted", bytes(one.on_host)]] : [])])], { columns: 5, key: `rank-${one.stage}` }));
  return panel("Training memory by rank", "ranks", open, { note: `The ranks of a pipeline stage hold the same: ${bytes(usable)} of ${bytes(memory)} can be used.` },
    el("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "memory by rank" }, el("table", {}, head(["pipeline stage"], ["ranks", "n"], ["bytes", "n"], [""], [""]), el("tbody", {}, rows))));
}

export function ranked(now, open) {
  const { layouts, tried, fitting } = now.train.search;
  const title = "Layouts for training, ranked";
  if (!layouts.length) return panel(title, "ranked", open, { wide: true }, el("p", { class: "no" }, `✗ None of ${whole(tried)} fits`));
  const rows = layouts.map((one) => {
    const { dp, tp, pp, ep, cp, zero } = one.layout, batch = /--micro-batch (\d+)/.exec(one.options)?.[1] ?? "1";
    const values = { tp, pp, ep, cp, zero, batch, accumulate: one.accumulate, checkpointing: one.checkpointing };
    return el("tr", { "data-layout": one.options }, use("training", values, one.options), el("th", { scope: "row" }, el("code", {}, one.options)), cell(whole(dp)), cell(bytes(one.per_device_bytes)), cell(seconds(one.step_seconds)), cell(whole(one.tokens_per_second)));
  });
  return panel(title, "ranked", open, { wide: true, note: `The fastest of ${whole(fitting)} that fit, of ${whole(tried)} tried; the tokens of a step stay the same.` },
    el("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "layouts for training" }, el("table", { class: "tree" },
      head(["", "use"], ["layout"], ["replicas", "n"], ["per device", "n"], ["step", "n"], [`${now.train.unit}/s`, "n"]), el("tbody", {}, rows))));
}
