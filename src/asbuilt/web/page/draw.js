// Which panels are drawn of which documents, `now` and, where the model is changed, `before`; `open` shows their JSON.
import { answer } from "./figures.js";
import { offloaded, waiting } from "./host.js";
import { measured } from "./measured.js";
import { parameters, steps, tree } from "./model.js";
import { pools, transfer } from "./pools.js";
import { memory, roofline, speed, users } from "./serving.js";
import { ranked, ranks, training } from "./training.js";
import { cost, costs, formats, layouts, workload } from "./workload.js";

export function panels(now, before, open) {
  const made = [], { describe, serve, curves, train } = now;
  const served = before?.serve ? before : null;
  if (now.measure) made.push(measured(now, open));
  if (describe || serve || train) made.push(answer(now, before, open));
  if (serve) { // beside the figures stands what is as high, and as narrow: with changes a workload is wide
    const both = [serve.workload && workload(now, served, open), memory(now, served, open)];
    made.push(...(served ? both.reverse() : both));
  }
  if (serve?.disaggregated) made.push(pools(now, served, open), transfer(now, served, open));
  if (serve?.offload) made.push(offloaded(now, served, open));
  if (serve?.kv_host) made.push(waiting(now, served, open));
  if (serve?.cost) made.push(cost(now, served, open));
  if (serve?.layouts) made.push(layouts(now, open));
  if (curves) made.push(roofline(now, before, open));
  if (curves?.users.length && serve) made.push(users(now, before, open));
  if (curves && serve?.sweep.length) made.push(speed(now, before, open));
  if (curves && serve?.cost && serve.sweep.length) made.push(costs(now, before, open));
  if (curves?.contexts.length && serve) made.push(formats(now, open));
  if (train) made.push(training(now, before?.train ? before : null, open));
  if (train?.search) made.push(ranked(now, open));
  if (now.ranks) made.push(ranks(now, open));
  if (describe) made.push(parameters(now, before, open), tree(now, open), steps(now, open));
  return made.filter(Boolean);
}
