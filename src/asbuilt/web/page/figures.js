// The panel of the figures that are asked for first, `now` and, where the model is changed, `before`.
import { el } from "./dom.js";
import { bytes, count, difference, digits, scaled, seconds, whole } from "./format.js";
import { cell, derived, devices, head, panel, say, slug } from "./parts.js";

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
    ["tokens in the cache", s?.cache_tokens, whole, say(s && `of sequences of ${whole(s.context)} tokens, in the cache budget of ${bytes(s.kv_budget_bytes)}`)],
    ["largest context", s?.largest_context, whole, say("for the users that were asked for, within the model's")],
    ["first token", e?.middle?.prefill_seconds, seconds, say(s && `prompt of ${whole(s.prefill.prompt)}; theoretical minimum ${seconds(s.prefill.seconds)}, ${s.prefill.bound}-bound`, ...range("prefill_seconds", seconds))],
    ["time per token", e?.middle?.seconds_per_step, seconds, say(s?.decode && `batch of ${whole(s.decode.batch)}; theoretical minimum ${seconds(s.decode.seconds_per_step)}, ${s.decode.bound}-bound`, ...range("seconds_per_step", seconds))],
    ["tokens/s, all users", e?.middle?.tokens_per_second, (n) => digits(n, 4), say(s?.decode && `theoretical maximum ${digits(s.decode.tokens_per_second, 4)}`, ...range("tokens_per_second", (n) => digits(n, 4)))],
    ["training, per device", t?.per_device_bytes, bytes, say(t?.conventions.per_device_bytes)],
    ["training step", t?.step.seconds, seconds, say(t?.conventions.step)],
    ["training days", t?.days, digits, say(t?.conventions.days, t && `${scaled(t.tokens, "")} ${t.unit}`)],
  ];
}

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
  const fits = s && s.fits !== null && el("p", {}, el("span", { class: s.fits ? "yes" : "no" }, s.fits ? "✓ It fits" : Object.values(s.targets).includes(false) ? "✗ A target is missed" : "✗ It does not fit"),
    ` on ${whole(devices(s))} × ${s.machine}, in ${s.dtype}, cache in ${s.kv_dtype}`);
  const met = s && Object.entries(s.targets).map(([name, yes]) => el("p", {}, el("span", { class: yes ? "yes" : "no" }, yes ? "✓ met" : "✗ missed"), ` ${name}`));
  const told = [...(s?.warnings ?? []), ...(s?.refused ?? []).map((one) => `${one.path}: ${one.figure}: ${one.reason}`)].map((text) => el("p", { class: "problem" }, text));
  const start = s?.engine.command && el("details", {}, el("summary", {}, `The command that starts ${s.engine.title} with these values`),
    el("p", {}, el("code", {}, s.engine.command)), s.engine.command_leaves_out.length ? el("p", { class: "note" }, `It leaves out: ${s.engine.command_leaves_out.join("; ")}`) : null);
  const change = s?.suggestions?.length ? el("p", { class: "note" }, `What to change: ${s.suggestions.slice(0, 3).map((one) => `${one.option} (${one.effect})`).join("; ")}`) : "";
  return panel("Figures", s ? "serve" : "describe", open, { note: `A name opens its derivation.${s ? " Speeds are expected ones; the minimum and the range stand behind them." : ""}` },
    fits, met, told, change, start, el("div", { class: "scroll" }, el("table", {}, head(...names), el("tbody", {}, body))));
}
