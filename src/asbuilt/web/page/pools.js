// The panels of two pools: the devices that compute prompts, those that write answers, and what crosses between them.
import { el } from "./dom.js";
import { bytes, digits, scaled, seconds, whole } from "./format.js";
import { compared, ladder, panel, range, head } from "./parts.js";

const NAMES = [["prefill", "computes prompts"], ["decode", "writes answers"]];
const rate = (n) => (n === null ? "any number" : digits(n, 4)); // of answers of one token nothing is decoded

// Rows of one pool, of a plan that may have no such pool.
function held({ disaggregated: d, context }, name) {
  const pool = d[name], most = ({ [`${name}_requests_per_second`]: n }) => n;
  const rows = [
    ["devices", pool.gpus, whole, `tp ${pool.tp}, pp ${pool.pp}, ep ${pool.ep}; ${whole(pool.groups)} groups, each with its own sequences`],
    ["prefill chunk", pool.chunk, whole, "tokens at once"],
    ["weights of a device", pool.weight_bytes, bytes, "declared by the parts, one device's share"],
    ["cache of a device", pool.kv_budget_bytes, bytes, "what is left of its memory, no sampler's counted"],
    ["sequences that fit", pool.sequences_that_fit, (n) => (n === null ? "any number" : whole(n)), `of ${whole(context)} tokens, in all groups`],
  ];
  if (d.balance) rows.push(["requests/s at most", most(d.balance.middle), rate, `expected, ${range(d.balance, most, rate)}`, name === "decode" ? `with ${whole(d.balance.middle.decode_users)} sequences at once` : "in steps that are full of prompts"]);
  return rows;
}

export function pools(now, before, open) {
  const { disaggregated: d } = now.serve, was = before?.serve?.disaggregated ? before.serve : null;
  const half = ([name, does]) => el("div", {}, compared(held(now.serve, name), was && held(was, name), `pool-${name}`, `${name}: ${does}`),
    el("div", { class: "scroll" }, el("table", {}, head([`memory of a device that ${does}`], ["bytes", "n"], ...(was ? [["change", "n"]] : []), [""]),
      el("tbody", {}, ladder(d[name].ladder, { old: was?.disaggregated[name].ladder, total: true, key: `pool-${name}-memory` })))));
  const ratio = (one) => one.prefill_gpus_per_decode_gpu, b = d.balance;
  const equal = b && ratio(b.middle) !== null ? `; with ${digits(ratio(b.middle))} devices that prefill for each that decodes both would serve equally many requests` : "";
  const told = b ? ` Expected: ${b.middle.bound} limits the rate${equal}.` : "";
  return panel("Pools", "serve", open, { wide: true, note: `${whole(d.gpus)} devices. Users, layout and speeds of other panels are those of the pool that decodes.${told}` },
    el("div", { class: "halves" }, NAMES.map(half)));
}

function crossed({ disaggregated: { transfer: t, first_token: f }, prefill }) {
  return [
    ["prefill", f.prefill_expected.middle, seconds, `expected, ${range(f.prefill_expected)}`, `theoretical minimum ${seconds(prefill.seconds)}, ${prefill.bound}-bound`],
    ["cache sent", t.expected.middle, seconds, `expected, ${range(t.expected)}`, `theoretical minimum ${seconds(t.seconds)}`, `${bytes(t.bytes)} of ${whole(t.tokens)} tokens: ${bytes(t.bytes_from_a_device)} from each device, ${bytes(t.bytes_to_a_device)} to each`, `${scaled(t.bandwidth, "B/s")} of a device: ${t.source}`],
    ["first token", f.expected.middle, seconds, `expected, ${range(f.expected)}`, `theoretical minimum ${seconds(f.seconds)}`, t.how === "layerwise" ? "each layer's cache is sent while the next are computed, so what is sent is hidden but for the end" : "the cache is sent after its prompt: the sum of both"],
  ];
}

export function transfer(now, before, open) {
  const { transfer: t } = now.serve.disaggregated, was = before?.serve?.disaggregated && crossed(before.serve);
  return panel("Cache from prefill to decode", "serve", open, { note: `Of one prompt of ${whole(t.tokens)} tokens, nothing else being served; ${t.how === "layerwise" ? "sent layer by layer" : "sent after its prompt"}.` },
    compared(crossed(now.serve), was, "crossing"));
}
