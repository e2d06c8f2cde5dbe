// Which pages a search shows first, where they match alike: those that users act on, then the losses, and last the
// pages for people who change or judge the project. Sphinx puts this file beside its own search, whose scores it
// adjusts; the numbers below `score` are Sphinx's own.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const PLACES = [
      [/^(architecture|benchmarks|kernels|papers|peers|systems|trainings|packages)$/, -12],
      [/^(migrating|recipes|options|api\/)/, -4],
      [/^how-to\//, 4],
      [/^(losses\/general|concepts|quick-start|faq)$/, 2],
    ];
    const place = PLACES.find(([pages]) => pages.test(page));
    return score + (place ? place[1] : 0) + (kind === "title" ? 6 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
