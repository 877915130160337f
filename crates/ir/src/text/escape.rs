//! Escapes in quoted text.

/// What follows a backslash.
pub(super) fn escape(chars: &mut std::str::CharIndices<'_>) -> Option<char> {
    Some(match chars.next()?.1 {
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        '0' => '\0',
        c @ ('"' | '\'' | '\\') => c,
        'u' => return unicode_escape(chars),
        _ => return None,
    })
}

/// The `{7f}` of `\u{7f}`.
fn unicode_escape(chars: &mut std::str::CharIndices<'_>) -> Option<char> {
    if chars.next()?.1 != '{' {
        return None;
    }
    let mut code = 0u32;
    for (_, c) in chars {
        match c {
            '}' => return char::from_u32(code),
            c => code = code.checked_mul(16)?.checked_add(c.to_digit(16)?)?,
        }
    }
    None
}
