// The panels of training: memory by line, the step, days and money.
import { el } from "./dom.js";
import { bytes, count, difference, digits, seconds, whole } from "./format.js";
import { cell, derived, head, ladder, panel, say } from "./parts.js";

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
