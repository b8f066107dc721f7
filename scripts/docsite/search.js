// Search over the index that is a file of this site, and the menu, which is open where there is room for it.
"use strict";
(() => {
  const root = document.currentScript.dataset.root;
  const query = document.getElementById("query"), found = document.getElementById("found"), menu = document.getElementById("menu");
  const narrow = window.matchMedia("(max-width: 780px)");
  const setMenu = () => { menu.open = !narrow.matches; };
  narrow.addEventListener("change", setMenu);
  setMenu();
  const current = menu.querySelector("[aria-current]");
  if (current && !narrow.matches) menu.scrollTop = Math.max(0, current.offsetTop - menu.clientHeight / 2);

  let loading = null; // the index is fetched when somebody searches: a script, because a page opened as a file may not read other files
  const load = () => loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = root + "search-index.js";
    script.onload = () => done(window.searchIndex.map((each) => ({ ...each, low: each.title.toLowerCase(), body: (each.page + " " + each.text).toLowerCase() })));
    script.onerror = failed;
    document.head.append(script);
  });

  const score = (each, words) => words.reduce((sum, word) => {
    if (sum === null) return null;
    const title = each.low.includes(word), body = each.body.includes(word);
    return title || body ? sum + (title ? 5 : 0) + (each.low === word ? 5 : 0) + (body ? 1 : 0) : null;
  }, 0);

  const excerpt = (each, words) => {
    const at = Math.max(0, Math.min(...words.map((word) => each.text.toLowerCase().indexOf(word)).filter((at) => at >= 0), each.text.length) - 40);
    return (at ? "…" : "") + each.text.slice(at >= each.text.length - 40 ? 0 : at).slice(0, 120);
  };

  const show = async () => {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { found.hidden = true; return; }
    const index = await load();
    const best = index.map((each) => [score(each, words), each]).filter(([points]) => points !== null).sort((a, b) => b[0] - a[0]).slice(0, 14);
    found.replaceChildren(...best.map(([, each]) => {
      const item = document.createElement("li"), link = document.createElement("a"), small = document.createElement("small");
      link.href = root + each.at;
      link.textContent = each.title === each.page ? each.title : each.page + " › " + each.title;
      small.textContent = excerpt(each, words);
      link.append(small);
      item.append(link);
      return item;
    }));
    if (!best.length) {
      const none = document.createElement("li");
      none.className = "none";
      none.textContent = "Nothing found";
      found.append(none);
    }
    found.hidden = false;
  };

  query.addEventListener("input", show);
  query.addEventListener("focus", show);
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) found.hidden = true; });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); query.focus(); }
    if (event.key === "Escape") { found.hidden = true; query.blur(); }
    if (!event.target.closest(".search") || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
    const places = [query, ...found.querySelectorAll("a")], now = places.indexOf(document.activeElement);
    event.preventDefault();
    places[(now + (event.key === "ArrowDown" ? 1 : places.length - 1)) % places.length].focus();
  });
})();
