// The panels of serving: memory, the roofline, and curves of users and speed.
import { chart } from "./charts.js";
import { el } from "./dom.js";
import { bytes, digits, scaled, whole } from "./format.js";
import { head, ladder, panel } from "./parts.js";

export function memory(now, before, open) {
  const rows = ladder(now.serve.ladder, { old: before?.serve?.ladder, total: true, key: "memory" });
  const pool = now.serve.disaggregated ? " Of the pool that decodes." : "";
  return panel("Memory of one device", "serve", open, { note: `From the device's memory down to what is left for the cache. A name opens its formula, numbers and source.${pool}` },
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
      y: { name: "users", text: whole }, series, marks: [{ x: s.context, y: s.users, name: `${whole(s.users)} at ${whole(s.context)}`, class: "dot b", square: true }] }));
}

const at = (one) => [one.tokens_per_second_per_user, one.tokens_per_second];

// The expected speeds at each batch, the range of low and high efficiencies, and the theoretical maximum.
export function speed(now, before, open) {
  const { sweep, knee } = now.serve, d = now.curves.decode, { middle, low, high } = now.curves.speeds, fitting = now.serve.users_that_fit ?? 0;
  const old = before?.curves?.speeds.middle;
  const dots = middle.map((one) => ({ class: one.batch <= fitting ? "dot" : "hollow", text: `batch ${one.batch}: ${digits(one.tokens_per_second, 4)} tokens/s, ${digits(one.tokens_per_second_per_user, 4)} per user${one.batch <= fitting ? "" : ", does not fit"}` }));
  const series = [{ class: "limit", points: sweep.map(at) }, ...(old ? [{ class: "before", points: old.map(at) }] : []), { class: "curve", points: middle.map(at), dots }];
  const told = knee === null ? "memory-bound at every batch size" : `compute-bound from a batch of ${whole(knee)}`;
  const mark = d && { x: d.tokens_per_second_per_user, y: d.tokens_per_second, name: `batch of ${whole(d.batch)}`, class: "dot b", square: true };
  return panel("Throughput against speed per user", "curves", open, { note: `Batches of 1 to ${whole(sweep.at(-1).batch)}: expected, shaded from low to high efficiencies, dotted the theoretical maximum; filled: fits, hollow: does not. Decoding is ${told}.${old ? " Dashed: before." : ""}` },
    chart({ title: "Throughput against speed per user", description: told, x: { name: "tokens/s of one user", text: (n) => digits(n) }, y: { name: "tokens/s of all", text: (n) => scaled(n, "") },
      series, band: [...low.map(at), ...high.map(at).reverse()], marks: mark ? [mark] : [] }));
}
