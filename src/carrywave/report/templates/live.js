// Asks whether the run's files have changed, and replaces what is shown if they have; open details stay open.
(() => {
  let seen = "";
  const ask = async () => {
    let lost = false;
    try {
      const stamp = await (await fetch("stamp", {cache: "no-store"})).text();
      if (stamp !== seen) {
        if (seen) {
          const text = await (await fetch("./", {cache: "no-store"})).text();
          const next = new DOMParser().parseFromString(text, "text/html").querySelector("main");
          const open = [...document.querySelectorAll("details")].map(each => each.open);
          next.querySelectorAll("details").forEach((each, at) => { each.open = open[at] ?? false; });
          document.querySelector("main").replaceWith(document.adoptNode(next));
        }
        seen = stamp;
      }
    } catch (error) {
      lost = true;
    }
    const badge = document.querySelector(".live");
    badge.classList.toggle("lost", lost);
    badge.textContent = lost ? "no longer served" : "live";
    setTimeout(ask, 2000);
  };
  ask();
})();
