// Asks whether the run's files have changed, and replaces what is shown if they have; open details stay open.
(() => {
  let seen = "";
  const get = async path => {
    const answer = await fetch(path, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.text();
  };
  const ask = async () => {
    let lost = false;
    try {
      const stamp = await get("stamp");
      if (stamp !== seen) {
        if (seen) {
          const text = await get("./");
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
