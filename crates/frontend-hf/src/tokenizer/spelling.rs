//! The bytes that tokens stand for, as vocabularies spell them.

/// The byte of a SentencePiece byte token, `<0x41>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 2)
}

/// The bytes of a token of a vocabulary that writes them as GPT-2 does; `None` where a character
/// is none of those that stand for bytes.
pub(super) fn gpt2_bytes(token: &str) -> Option<Vec<u8>> {
    token.chars().map(gpt2_byte).collect()
}

/// The byte that GPT-2's vocabularies write as `c`: printable ones stand for themselves, the rest
/// are counted from U+0100 on (Radford et al. 2019, `bytes_to_unicode`).
fn gpt2_byte(c: char) -> Option<u8> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => Some(code as u8).filter(printable),
        code => (0..=u8::MAX).filter(|b| !printable(b)).nth((code - 0x100) as usize),
    }
}

/// The characters that stand for all bytes in GPT-2's vocabularies.
pub(super) fn gpt2_alphabet() -> impl Iterator<Item = char> {
    (0..0x144).filter_map(char::from_u32).filter(|c| gpt2_byte(*c).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_spelt_one_to_one() {
        assert_eq!(byte_token("<0xE2>"), Some(0xE2));
        assert_eq!(byte_token("<0x1>"), None);
        assert_eq!(gpt2_bytes("Ġa"), Some(b" a".to_vec()));
        assert_eq!(gpt2_byte('Ċ'), Some(b'\n'));
        assert_eq!(gpt2_bytes("a▁"), None);
        let mut seen: Vec<u8> = gpt2_alphabet().filter_map(gpt2_byte).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
    }
}
