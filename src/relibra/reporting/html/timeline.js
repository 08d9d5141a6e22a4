// Draws timelines of ranks, all on one scale of time; sliders choose layer, zoom and time.
(async () => {
  const byId = (id) => document.getElementById(id), number = (input) => Number(input.value);
  const root = byId("timeline-explorer");
  if (!root) return;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const data = JSON.parse(byId("timeline-data").textContent), lanes = Object.keys(data.lanes);
  const laneOf = (stage) => Math.max(0, lanes.findIndex((lane) => data.lanes[lane].includes(stage)));
  const LEFT = 58, LANE = 13, AXIS = 20, BLOCK = lanes.length * LANE + 7;
  const STYLES = { // colour and texture: solid, stripes, dots or empty
    attention: ["#0072b2", "solid"], experts: ["#e69f00", "stripes"], "at home": ["#e69f00", "solid"], optimizer: ["#cc79a7", "dots"],
    dispatch: ["#56b4e9", "solid"], combine: ["#009e73", "stripes"],
    "dispatch in node": ["#56b4e9", "dots"], "combine in node": ["#009e73", "dots"],
    push: ["#d55e00", "solid"], return: ["#cc79a7", "stripes"], "wait push": ["#8a8a8a", "empty"], "wait return": ["#8a8a8a", "empty"],
    gradients: ["#f0e442", "dots"],
  };
  const style = (stage) => STYLES[stage] || ["#999999", stage.startsWith("wait") ? "empty" : "solid"];
  const scaled = (value, units) => {
    const [unit, factor] = units.find(([, least]) => value >= least) || units.at(-1);
    return `${(value / factor).toPrecision(3)} ${unit}`;
  };
  const duration = (seconds) => scaled(seconds, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]);
  const size = (bytes) => scaled(bytes, [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]);

  async function read(canvas, link) { // the Chrome trace that the link saves, in seconds from its first event
    const packed = Uint8Array.from(atob(link.href.split(",")[1]), (c) => c.charCodeAt(0));
    const trace = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
    const slices = trace.traceEvents.filter((slice) => slice.ph === "X"), first = slices[0].ts; // in order of time
    const events = slices.map(({ cat, pid, ts, dur, args }) => {
      const start = (ts - first) / 1e6;
      return { ...args, stage: cat, rank: pid, start, seconds: dur / 1e6, end: start + dur / 1e6, lane: laneOf(cat) };
    });
    const ranks = [...new Set(events.map((event) => event.rank))].sort((a, b) => a - b);
    return { canvas, events, ranks, end: events.reduce((most, event) => Math.max(most, event.end), 0), selected: -1 };
  }
  const links = root.querySelectorAll("a[download]");
  const timelines = await Promise.all([...root.querySelectorAll("canvas[data-timeline]")].map((one, i) => read(one, links[i])));
  const [layer, zoom, time] = ["timeline-layer", "timeline-zoom", "timeline-move"].map(byId);
  const total = Math.max(...timelines.map((one) => one.end));

  function extent({ events, end }) { // the forward pass through the chosen layer, which combine ends
    const chosen = number(layer) ? events.filter((event) => event.layer === data.layers[number(layer) - 1]) : [];
    if (!chosen.length) return [0, end];
    const ends = chosen.filter((event) => event.stage === "combine").map((event) => event.end);
    return [chosen[0].start, Math.max(chosen[0].start, ends.length ? Math.min(...ends) : 0)];
  }

  function windows() { // start of each timeline's window, and the seconds that all of them show
    const extents = timelines.map(extent), all = number(layer) === 0;
    const whole = Math.max(...extents.map(([a, b]) => b - a)) || total, margin = all ? 0 : 0.04 * whole;
    const span = (whole + 2 * margin) / 2 ** (number(zoom) / 4);
    const room = (all ? whole : total) - span; // of a layer the window starts there and moves to the end of the step
    const shift = (number(time) / 1000) * Math.max(0, room);
    return { span, starts: extents.map(([a]) => a - margin + shift) };
  }

  function texture([fill, kind]) { // a tile of 6 x 6 pixels
    const tile = document.createElement("canvas"), pen = tile.getContext("2d"), panel = colour("--panel");
    tile.width = tile.height = 6;
    pen.fillStyle = kind === "empty" ? panel : fill;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = pen.fillStyle = kind === "empty" ? fill : panel;
    if (kind === "dots") pen.fillRect(2, 2, 2, 2);
    pen.lineWidth = 1.2;
    if (kind === "stripes" || kind === "empty") for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  }

  function draw({ canvas, events, ranks, selected }, start, span) {
    const width = canvas.clientWidth, height = ranks.length * BLOCK + AXIS, scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const context = canvas.getContext("2d"), inner = width - LEFT, x = (seconds) => LEFT + ((seconds - start) / span) * inner;
    context.scale(scale, scale);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    ranks.forEach((rank, i) => {
      context.fillStyle = colour(i % 2 ? "--page" : "--panel");
      context.fillRect(LEFT, i * BLOCK, inner, BLOCK);
      context.fillStyle = colour("--soft");
      context.fillText(`rank ${rank}`, 0, i * BLOCK + BLOCK / 2 + 2);
    });
    context.fillText(duration(Math.max(0, start)), LEFT, height - 5);
    context.textAlign = "right";
    context.fillText(`+ ${duration(span)}`, width, height - 5);
    context.rect(LEFT, 0, inner, height);
    context.clip();
    const paints = {}, [accent, soft] = [colour("--accent"), colour("--soft")];
    events.forEach((event, i) => {
      const left = x(event.start), wide = Math.max(0.6, x(event.end) - left);
      if (left + wide < LEFT || left > width) return;
      const top = ranks.indexOf(event.rank) * BLOCK + event.lane * LANE + 2;
      context.fillStyle = paints[event.stage] ??= texture(style(event.stage));
      context.fillRect(left, top, wide, LANE - 2);
      context.strokeStyle = i === selected ? accent : soft;
      context.lineWidth = i === selected ? 3 : 1;
      if (i === selected || (style(event.stage)[1] === "empty" && wide > 3)) context.strokeRect(left, top, wide, LANE - 2);
    });
  }

  function readOut({ canvas, events, selected }) {
    const { rank, stage, layer, micro_batch, seconds, start, bytes, bytes_between_nodes } = events[selected];
    byId("timeline-readout").textContent = [
      `${canvas.dataset.name}, rank ${rank}: ${stage}`,
      layer >= 0 && `layer ${layer}`,
      micro_batch >= 0 && `micro-batch ${micro_batch}`,
      `${duration(seconds)} from ${duration(start)} on`,
      bytes && size(bytes),
      bytes_between_nodes && `of them ${size(bytes_between_nodes)} to other nodes`,
    ].filter(Boolean).join(", ");
  }

  function show() {
    const { span, starts } = windows(), name = number(layer) ? data.layers[number(layer) - 1] : "all";
    byId("timeline-layer-value").textContent = name;
    layer.setAttribute("aria-valuetext", `layer ${name}`);
    byId("timeline-zoom-value").textContent = `${Number((2 ** (number(zoom) / 4)).toPrecision(2))}×`;
    byId("timeline-move-value").textContent = duration(Math.max(0, starts[0]));
    timelines.forEach((one, i) => draw(one, starts[i], span));
  }

  timelines.forEach((one, index) => {
    const { canvas, events, ranks } = one;
    const move = (input, by) => { input.value = number(input) + by; };
    const select = (i) => { one.selected = Math.max(0, Math.min(events.length - 1, i)); readOut(one); };
    canvas.addEventListener("keydown", (event) => {
      const { span, starts } = windows(), step = Math.max(1, Math.round((100 * span) / Math.max(span, total - span)));
      const first = Math.max(0, events.findIndex((event) => event.start >= starts[index]));
      const actions = {
        ArrowLeft: () => move(time, -step),
        ArrowRight: () => move(time, step),
        "+": () => move(zoom, 1),
        "=": () => move(zoom, 1),
        "-": () => move(zoom, -1),
        ArrowDown: () => select(one.selected < 0 ? first : one.selected + 1),
        ArrowUp: () => select(one.selected < 0 ? first : one.selected - 1),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
      show();
    });
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect(), y = event.clientY - box.top, { span, starts } = windows();
      const seconds = starts[index] + ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * span;
      const rank = ranks[Math.floor(y / BLOCK)], lane = Math.floor((y % BLOCK) / LANE);
      const far = (one) => (one.rank === rank && one.lane === lane ? Math.max(0, one.start - seconds, seconds - one.end) : Infinity);
      const best = events.reduce((near, one, i) => (far(one) < far(events[near]) ? i : near), 0);
      if (far(events[best]) === Infinity) return;
      select(best);
      show();
    });
  });

  function drawLegend() {
    const used = new Set(timelines.flatMap((one) => one.events.map((event) => event.stage)));
    byId("timeline-legend").replaceChildren(...[...used].sort((a, b) => laneOf(a) - laneOf(b)).map((stage) => {
      const item = document.createElement("li"), swatch = document.createElement("canvas");
      [swatch.width, swatch.height] = [24, 12];
      const context = swatch.getContext("2d");
      context.fillStyle = texture(style(stage));
      context.fillRect(0, 0, 24, 12);
      context.strokeStyle = colour("--soft");
      context.strokeRect(0.5, 0.5, 23, 11);
      item.append(swatch, `${stage} (${lanes[laneOf(stage)]})`);
      return item;
    }));
  }
  layer.value = data.first; // browsers keep a choice over a reload
  [zoom.value, time.value] = [0, 0];
  layer.addEventListener("input", () => { time.value = 0; });
  for (const input of [layer, zoom, time]) input.addEventListener("input", show);
  new ResizeObserver(show).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLegend(); show(); });
  drawLegend();
  show();
})();
