"use strict";
// The page's state is in its address: #view, or #view:99,112 with the lines of a source that are
// open, or #old--new for two versions side by side. Without this script all views are shown, one
// below the other, and no two versions.
{
  const views = [...document.querySelectorAll(".view")];
  const links = [...document.querySelectorAll("nav a")];
  let shown;

  const lines = (view) => [...view.querySelectorAll(".source details")];
  const number = (line) => `${line.parentElement.value}`;

  const code = (source, number) => {
    const row = source.children[number - source.start];
    return (row.querySelector("summary code") ?? row).cloneNode(true).childNodes;
  };

  const textOf = (source, number) =>
    [...code(source, number)].map((part) => part.textContent).join("").trimEnd();

  // ---- Two versions side by side ----

  const figures = JSON.parse(document.getElementById("figures").textContent);
  const COUNTERS = ["requests", "wavefronts", "conflicts", "sectors"];
  const TIME = "predicted time";
  const CONTEXT = 3; // lines around what differs

  const element = (name, ...content) => {
    const made = document.createElement(name);
    made.append(...content);
    return made;
  };
  const us = (value) => value.toFixed(1);
  const count = (value) => value.toLocaleString("en");
  const range = (first, end) => Array.from({ length: end - first }, (_, i) => first + i);

  const scrolling = (label, table) => {
    const region = element("div", table);
    Object.assign(region, { className: "scroll", tabIndex: 0, role: "region", ariaLabel: label });
    return region;
  };

  // A table of figures by name: before, after, and the difference.
  const comparison = (title, names, [before, after], text) => {
    const rows = [...new Set([...Object.keys(before), ...Object.keys(after)])].map((name) => {
      const [old, now] = [before[name] ?? 0, after[name] ?? 0];
      const sign = text(old) === text(now) ? "" : now < old ? "\u2212" : "+";
      const head = element("th", name);
      head.className = "w";
      const cells = [text(old), text(now), sign + text(Math.abs(now - old))];
      return element("tr", head, ...cells.map((cell) => element("td", cell)));
    });
    if (!rows.length) return "";
    const head = [...names, "difference"].map((name) => element("th", name));
    const table = element(
      "table",
      element("caption", title),
      element("thead", element("tr", element("td"), ...head)),
      element("tbody", ...rows),
    );
    table.className = "results";
    return scrolling(title, table);
  };

  // The runs of equal lines, [start in a, start in b, length]: the longest, and those before and
  // after it.
  const equalRuns = (a, b, from = [0, 0], to = [a.length, b.length]) => {
    let [at, length] = [from, 0];
    let above = [];
    for (let i = from[0]; i < to[0]; i++) {
      const row = [];
      for (let j = from[1]; j < to[1]; j++) {
        if (a[i] !== b[j]) continue;
        row[j] = (above[j - 1] ?? 0) + 1;
        if (row[j] > length) [at, length] = [[i - row[j] + 1, j - row[j] + 1], row[j]];
      }
      above = row;
    }
    if (!length) return [];
    const end = at.map((n) => n + length);
    return [...equalRuns(a, b, from, at), [...at, length], ...equalRuns(a, b, end, to)];
  };

  // What changes from some lines of the old version to some of the new one. A change of the stalls
  // counts from one hundredth of the old version's time.
  const changes = (versions, numbers) => {
    const sums = versions.map(({ lines }, side) =>
      range(0, COUNTERS.length + 1).map((column) =>
        numbers[side].reduce((sum, n) => sum + (lines[n]?.[column] ?? 0), 0),
      ),
    );
    const [before, after] = sums;
    const found = COUNTERS.flatMap((name, i) =>
      before[i] === after[i] ? [] : [`${name} ${count(before[i])} \u2192 ${count(after[i])}`],
    );
    const [old, now] = sums.map((all) => all.at(-1));
    if (versions[1].times[TIME] && Math.abs(now - old) >= versions[0].times[TIME] / 100) {
      found.unshift(`stalls ${us(old)} \u2192 ${us(now)} us`);
    }
    return found;
  };

  // The lines of two versions in order, as groups: each pair of equal lines, and the lines between
  // such pairs. A group has its lines' numbers in each version, and what changes.
  const align = (versions, sources) => {
    const texts = sources.map((source) =>
      range(source.start, source.start + source.children.length).map((n) => textOf(source, n)),
    );
    const groups = [];
    const put = (from, to, isEqual) => {
      const numbers = sources.map(({ start }, side) => range(start + from[side], start + to[side]));
      const found = changes(versions, numbers);
      groups.push({ numbers, found, isSame: isEqual && !found.length });
    };
    let done = [0, 0];
    for (const [i, j, length] of [...equalRuns(...texts), [...texts.map((all) => all.length), 0]]) {
      if (done[0] < i || done[1] < j) put(done, [i, j], false);
      for (const k of range(0, length)) put([i + k, j + k], [i + k + 1, j + k + 1], true);
      done = [i + length, j + length];
    }
    return groups;
  };

  // The lines of both versions that differ, in the source or in a figure, with some around them.
  const sideBySide = (versions, sources) => {
    const body = element("tbody");
    const span = (look, width, ...content) => {
      const cell = element("td", ...content);
      cell.colSpan = width;
      const row = element("tr", ...(width < 4 ? [element("td"), cell] : [cell]));
      row.className = look;
      body.append(row);
    };
    const add = (numbers) => {
      const sides = numbers.map((n, side) => (n ? [...code(sources[side], n)] : []));
      const [one, other] = numbers.map((n, side) => n && textOf(sources[side], n));
      const row = body.insertRow();
      if (one !== other) row.className = "differs";
      sides.forEach((content, side) => {
        const isMarked = one !== other && numbers[side];
        const marked = isMarked ? [element(side ? "ins" : "del", ...content)] : content;
        row.append(element("td", numbers[side] ?? ""), element("td", ...marked));
      });
    };
    const groups = align(versions, sources);
    let isGap = false;
    groups.forEach(({ numbers, found, isSame }, at) => {
      const around = groups.slice(Math.max(0, at - CONTEXT), at + CONTEXT + 1);
      if (around.every((group) => group.isSame)) {
        isGap = true;
        return;
      }
      if (isGap && body.rows.length) span("gap", 4, "\u22ef");
      isGap = false;
      const [olds, nows] = numbers;
      for (const i of range(0, Math.max(olds.length, nows.length))) add([olds[i], nows[i]]);
      if (found.length) span("changes", 3, ...found.map((one) => element("span", one)));
    });
    const columns = ["number", "", "number", ""].map((look) => {
      const column = element("col");
      column.className = look;
      return column;
    });
    const head = versions.flatMap(({ name }) => [element("td"), element("th", name)]);
    const table = element(
      "table",
      element("colgroup", ...columns),
      element("thead", element("tr", ...head)),
      body,
    );
    table.className = "diff";
    return table;
  };

  const compare = document.getElementById("compare");
  const form = compare?.querySelector("form");
  const putSideBySide = (slugs) => {
    [form.old.value, form.new.value] = slugs;
    const versions = slugs.map((slug) => figures[slug]);
    const names = versions.map(({ name }) => name);
    const sources = slugs.map((slug) => document.querySelector(`#${slug} .source`));
    const about = document.querySelector(`#${slugs[1]} dd`).textContent;
    const times = versions.map((version) => version.times);
    const counts = versions.map((version) => version.counts);
    const hasStalls = times.every((parts) => parts[TIME]);
    const note = element(
      "p",
      hasStalls
        ? "A line's stalls are a part of the predicted time: its share of the warps' cycles. " +
            `Changes below a hundredth of the time of ${names[0]} are left out.`
        : "Stalls are not compared, because they are not known for both versions.",
    );
    note.className = "note";
    compare.lastElementChild.replaceChildren(
      element("p", about),
      hasStalls ? comparison("Predicted time and its parts, us", names, times, us) : "",
      comparison("Memory traffic of the whole launch", names, counts, count),
      element("h3", "Lines that differ, in the source or in a figure"),
      note,
      scrolling(names.join(" next to "), sideBySide(versions, sources)),
    );
  };
  form?.addEventListener("change", () => {
    location.hash = `${form.old.value}--${form.new.value}`;
  });
  if (form) form.hidden = false;

  const show = () => {
    const [id, open = ""] = decodeURIComponent(location.hash.slice(1)).split(":");
    const slugs = Object.keys(figures);
    const pair = id === "compare" ? slugs.slice(0, 2) : id.split("--");
    const isPair = pair.length === 2 && pair.every((slug) => slugs.includes(slug));
    const wanted = isPair ? compare : (views.find((view) => view.id === id) ?? views[0]);
    if (isPair) putSideBySide(pair);
    const numbers = new Set(open.split(","));
    for (const view of views) view.hidden = view !== wanted;
    for (const link of links) {
      if (link.hash === `#${isPair ? id : wanted.id}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const line of lines(wanted)) line.open = numbers.has(number(line));
    const first = lines(wanted).find((line) => line.open);
    if (first) {
      first.scrollIntoView({ block: "center" });
      first.closest(".scroll").scrollLeft = 0;
    } else if (shown && shown !== wanted) scrollTo(0, 0);
    shown = wanted;
  };

  for (const view of views) {
    for (const line of lines(view)) {
      line.addEventListener("toggle", () => {
        if (view.hidden) return;
        const open = lines(view).filter((one) => one.open).map(number);
        const hash = `#${view.id}${open.length ? `:${open}` : ""}`;
        if (decodeURIComponent(location.hash) !== hash) history.replaceState(null, "", hash);
      });
    }
  }

  // Left and right go from one version, or step, to its neighbour.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const row = [...(event.target.closest("nav p")?.querySelectorAll("a") ?? [])];
    const next = row[row.indexOf(event.target) + step];
    if (!step || !next) return;
    event.preventDefault();
    next.focus();
  });

  if (views.length) {
    addEventListener("hashchange", show);
    show();
  }
}
