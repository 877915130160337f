//! Precedence and staleness of choices are tested beside the templates that they choose from.

use super::*;

#[test]
fn a_choice_is_found_in_plans_of_any_limits() {
    let limits = |t, seqs| Dims { t, b: seqs, s: 64, pairs: 4096, seqs };
    let steps = |text: &str| text.parse::<Bucket>().unwrap_or_else(|e| panic!("{text}: {e}"));
    let site = |text: &str| Site { op: "o".to_owned(), operands: Vec::new(), steps: steps(text) };
    let names = [
        "T = 1 (decode)",
        "T = 2..8 (decode)",
        "T >= 129 (decode)",
        "any T (decode)",
        "any T",
        "T >= 17",
    ];
    let sites = names.into_iter().map(|name| (site(name), name.to_owned())).collect();
    let chosen = Chosen { source: "f".to_owned(), sites };
    for (t, seqs, wanted, expected) in [
        (2048, 256, "T = 129..256 (decode)", Some("T >= 129 (decode)")),
        (2048, 300, "T = 129..300 (decode)", Some("T >= 129 (decode)")),
        (2048, 256, "T = 17..2048", Some("T >= 17")),
        (64, 4, "T = 17..64", Some("T >= 17")),
        (64, 4, "T = 2..4 (decode)", Some("T = 2..8 (decode)")),
        // What is chosen for fewer steps goes before what is chosen for more.
        (64, 1, "T = 1 (decode)", Some("T = 1 (decode)")),
        (64, 8, "T = 1..8 (decode)", Some("any T (decode)")),
        (64, 8, "T = 1..64", Some("any T")),
        (2048, 256, "T = 17..64 (decode)", None),
        (2048, 256, "T = 9..2048", None),
    ] {
        let found = chosen.variant(&site(wanted), &limits(t, seqs));
        assert_eq!(found.map(|(_, v)| v), expected, "{wanted} of {t} tokens, {seqs} sequences");
    }
    let other = Site { op: "p".to_owned(), ..site("any T") };
    assert_eq!(chosen.variant(&other, &limits(64, 8)), None);
}
