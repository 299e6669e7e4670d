"use strict";
// The page's state is in its address: #view, or #view:99,112 with the lines of a source that are
// open. Without this script all views are shown, one below the other.
{
  const views = [...document.querySelectorAll(".view")];
  const links = [...document.querySelectorAll("nav a")];
  let shown;

  const lines = (view) => [...view.querySelectorAll(".source details")];
  const number = (line) => `${line.parentElement.value}`;

  const code = (source, number) => {
    const row = source.children[number - source.start];
    return row && (row.querySelector("summary code") ?? row).cloneNode(true).childNodes;
  };

  // Two versions side by side: a table of line numbers becomes one of the lines themselves, from
  // the two sources, with some around what differs.
  const CONTEXT = 3;
  const element = (name, ...content) => {
    const made = document.createElement(name);
    made.append(...content);
    return made;
  };
  const putSideBySide = (table) => {
    const sources = [table.dataset.old, table.dataset.new].map((slug) =>
      document.querySelector(`#${slug} .source`),
    );
    const body = element("tbody");
    // Each side: its line's number, or null.
    const add = (...numbers) => {
      const codes = numbers.map((n, side) => (n ? [...code(sources[side], n)] : null));
      const [one, other] = codes.map((all) => all?.map((part) => part.textContent).join("").trim());
      const differs = one !== other;
      const row = body.insertRow();
      if (differs) row.className = "differs";
      codes.forEach((content, side) => {
        const name = side ? "ins" : "del";
        const marked = content && differs ? [element(name, ...content)] : (content ?? []);
        row.append(element("td", numbers[side] ?? ""), element("td", ...marked));
      });
    };
    const span = (look, width, ...content) => {
      const cell = element("td", ...content);
      cell.colSpan = width;
      const row = element("tr", ...(width < 4 ? [element("td"), cell] : [cell]));
      row.className = look;
      body.append(row);
    };
    const range = (first, last) =>
      Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);
    // Parse "61\u201364", "61" or, for no line, "after 60".
    const parse = (cell) => {
      const [first, last = first] = cell.textContent.match(/\d+/g).map(Number);
      return cell.textContent.includes("after") ? [first + 1, first] : [first, last];
    };
    let end = null; // of the new version's lines so far
    for (const row of table.tBodies[0].rows) {
      const [old, now] = [parse(row.cells[0]), parse(row.cells[1])];
      const shift = old[0] - now[0];
      const tail = end && Math.min(end + CONTEXT, now[0] - 1);
      const lead = Math.max((tail ?? sources[1].start - 1) + 1, now[0] - CONTEXT);
      for (const n of end ? range(end + 1, tail) : []) add(n + shift, n);
      if (end && lead > tail + 1) span("gap", 4, "\u22ef");
      for (const n of range(lead, now[0] - 1)) add(n + shift, n);
      const [olds, nows] = [range(...old), range(...now)];
      for (let i = 0; i < Math.max(olds.length, nows.length); i++) {
        add(olds[i] ?? null, nows[i] ?? null);
      }
      const changes = row.cells[2].textContent.trim();
      if (changes) span("changes", 3, ...changes.split("; ").map((one) => element("span", one)));
      end = now[1];
      if (row.nextElementSibling) continue;
      for (const n of range(end + 1, end + CONTEXT)) {
        if (code(sources[1], n)) add(n + old[1] - now[1], n);
      }
    }
    const [one, other, counters] = table.tHead.rows[0].cells;
    one.colSpan = other.colSpan = 2;
    counters.remove();
    table.tBodies[0].replaceWith(body);
    table.prepend(element("colgroup", ...["number", "", "number", ""].map((look) => {
      const column = element("col");
      column.className = look;
      return column;
    })));
    table.className = "diff";
  };
  document.querySelectorAll("table.hunks").forEach(putSideBySide);

  const show = () => {
    const [id, open = ""] = decodeURIComponent(location.hash.slice(1)).split(":");
    const wanted = views.find((view) => view.id === id) ?? views[0];
    const numbers = new Set(open.split(","));
    for (const view of views) view.hidden = view !== wanted;
    for (const link of links) {
      if (link.hash === `#${wanted.id}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const line of lines(wanted)) line.open = numbers.has(number(line));
    if (shown !== wanted) {
      const first = lines(wanted).find((line) => line.open);
      if (first) {
        first.scrollIntoView({ block: "center" });
        first.closest(".scroll").scrollLeft = 0;
      } else if (shown) scrollTo(0, 0);
    }
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
