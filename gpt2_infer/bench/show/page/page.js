"use strict";
// The page's state is in its address: #view, or #view:99,112 with the lines of a source that are
// open. Without this script all views are shown, one below the other.
{
  const views = [...document.querySelectorAll(".view")];
  const links = [...document.querySelectorAll("nav a")];
  let shown;

  const lines = (view) => [...view.querySelectorAll(".source details")];
  const number = (line) => `${line.parentElement.value}`;

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

  // Left and right go from one link to its neighbour.
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
