//! Which trace a request is part of, as its headers say (W3C Trace Context).

use axum::http::HeaderMap;

/// The span of whoever sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "otlp"), allow(dead_code, reason = "what sends it is not built"))]
pub(super) struct Parent {
    pub(super) trace: u128,
    pub(super) span: u64,
    /// Whether it is recorded.
    pub(super) sampled: bool,
}

impl Parent {
    /// What the headers say; none where they say nothing, or what is not well formed.
    pub(super) fn of(headers: &HeaderMap) -> Option<Parent> {
        let mut all = headers.get_all("traceparent").iter();
        let (first, None) = (all.next()?, all.next()) else { return None };
        Parent::parse(first.to_str().ok()?)
    }

    fn parse(text: &str) -> Option<Parent> {
        let mut parts = text.trim().split('-');
        let mut hex = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            let is_hex = part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            u128::from_str_radix(part, 16).ok().filter(|_| is_hex)
        };
        let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // Later versions may say more; this one does not.
        let known = version < 0xff && (version > 0 || parts.next().is_none());
        let span = u64::try_from(span).ok()?;
        (known && trace > 0 && span > 0).then_some(Parent { trace, span, sampled: flags & 1 == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_well_formed_is_no_parent() {
        let trace = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
        let expected = Parent { trace, span: 0x00f0_67aa_0ba9_02b7, sampled: true };
        let (ids, more) = ("4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", "-what-ever");
        assert_eq!(Parent::parse(&format!("00-{ids}-01")), Some(expected));
        assert_eq!(Parent::parse(&format!("cc-{ids}-09{more}")), Some(expected));
        let unsampled = Parent { sampled: false, ..expected };
        assert_eq!(Parent::parse(&format!("00-{ids}-00")), Some(unsampled));
        let zeros = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        for wrong in [
            "",
            "00",
            &format!("ff-{ids}-01"),
            &format!("00-{ids}-01{more}"),
            &format!("00-{}-01", ids.to_uppercase()),
            &format!("00-{ids}"),
            &format!("00-+{}-01", &ids[1..]),
            &zeros,
        ] {
            assert_eq!(Parent::parse(wrong), None, "{wrong}");
        }
    }
}
