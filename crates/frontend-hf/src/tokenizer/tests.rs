use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A byte-level BPE with a few merges that join characters and halves of characters.
fn byte_level() -> Tokenizer {
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab: Vec<String> = alphabet.iter().map(char::to_string).collect();
    // Ġ is a space; Ã© is é; ðŁ and ĺĢ are the halves of an emoji.
    let merges = [("Ġ", "t"), ("Ġt", "h"), ("Ã", "©"), ("ð", "Ł"), ("ĺ", "Ģ"), ("ðŁ", "ĺĢ")];
    vocab.extend(merges.iter().map(|(a, b)| format!("{a}{b}")));
    let ids: serde_json::Map<String, Value> =
        vocab.iter().enumerate().map(|(i, token)| (token.clone(), i.into())).collect();
    let added = json!([
        {"id": vocab.len(), "content": "<|end|>", "special": true, "single_word": false,
         "lstrip": false, "rstrip": false, "normalized": false},
        {"id": vocab.len() + 1, "content": "two words", "special": false, "single_word": false,
         "lstrip": false, "rstrip": false, "normalized": false},
    ]);
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    build(&json!({
        "version": "1.0", "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0,
        "direction": "Right"}, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": merges.map(|(a, b)| [a, b])},
    }))
}

/// A SentencePiece-style vocabulary with byte fallback, decoded as Llama 2's is.
fn byte_fallback() -> Tokenizer {
    let words = ["<unk>", "<s>", "▁", "▁the", "▁a", "the", "é", "▁▁"];
    let bytes = (0..256).map(|b| format!("<0x{b:02X}>"));
    let vocab: serde_json::Map<String, Value> = words
        .iter()
        .map(ToString::to_string)
        .chain(bytes)
        .enumerate()
        .map(|(i, token)| (token, i.into()))
        .collect();
    build(&json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 1, "content": "<s>", "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>",
            "fuse_unk": true, "byte_fallback": true},
    }))
}

fn build(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

/// The stream's pieces for `ids`, the flushed one last.
fn pieces(stream: &mut TextStream, ids: &[u32]) -> Vec<String> {
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.flush().unwrap());
    pieces
}

#[test]
fn text_survives_the_round_trip_uncut() {
    let t = byte_level();
    let text = "the thé 😀 two words<|end|>";
    let ids = t.encode(text, true).unwrap();
    assert!(ids.len() > 3, "truncation is turned off");
    assert_eq!(t.decode(&ids, false).unwrap(), text);
    assert_eq!(t.decode(&ids, true).unwrap(), "the thé 😀 two words");
    assert_eq!(t.vocab_size(), 256 + 6 + 2);
    assert_eq!(t.id_of("<|end|>"), Some(262));
    assert_eq!(t.token_of(262).as_deref(), Some("<|end|>"));
    assert_eq!((t.id_of("nope"), t.token_of(9999)), (None, None));
}

#[test]
fn pieces_are_whole_characters() {
    let t = byte_level();
    let halves = [t.id_of("ðŁ").unwrap(), t.id_of("ĺ").unwrap(), t.id_of("Ģ").unwrap()];
    assert_eq!(pieces(&mut t.stream(true), &halves), ["", "", "😀", ""]);
    // Left unfinished, it is a replacement character, and only at the end.
    assert_eq!(pieces(&mut t.stream(true), &halves[..2]), ["", "", "\u{FFFD}"]);
}

#[test]
fn spaces_between_words_are_kept_and_the_first_is_not() {
    let t = byte_fallback();
    let the = t.id_of("▁the").unwrap();
    let byte = |b: u32| 8 + b;
    let ids = [1, the, the, byte(0xC3), byte(0xA9), 1, the];
    assert_eq!(pieces(&mut t.stream(true), &ids), ["", "the", " the", "", "", "", "é the", ""]);
}

#[test]
fn a_stream_can_be_used_again_after_its_flush() {
    let t = byte_fallback();
    let the = t.id_of("▁the").unwrap();
    let mut stream = t.stream(true);
    assert_eq!(pieces(&mut stream, &[the, the]).concat(), "the the");
    assert_eq!(pieces(&mut stream, &[the]).concat(), "the");
}

#[test]
fn roles_come_from_either_file() {
    let files = ModelFiles::embedded(
        "m",
        &[
            (
                "tokenizer_config.json",
                br#"{"bos_token": null, "eos_token": {"content": "<|end|>"}, "chat_template": "x"}"#,
            ),
            ("special_tokens_map.json", br#"{"bos_token": "<s>", "eos_token": "no"}"#),
        ],
    );
    let special = SpecialTokens::open(&files).unwrap();
    assert_eq!(
        special.iter().collect::<Vec<_>>(),
        [("eos_token", "<|end|>"), ("bos_token", "<s>")]
    );
    let t = Tokenizer { special: Arc::new(special), ..byte_level() };
    assert_eq!((t.eos_id(), t.bos_id()), (Some(262), None));
}

#[test]
fn what_is_not_a_tokenizer_is_an_error() {
    for json in ["", "{}", "[1]", r#"{"model": {"type": "BPE"}}"#, "\u{0}"] {
        let message = Tokenizer::from_bytes(json.as_bytes()).unwrap_err().to_string();
        assert!(message.starts_with("tokenizer.json: "), "{message}");
    }
    let whole = byte_fallback().inner.to_string(false).unwrap();
    for cut in (0..whole.len()).filter(|&cut| whole.is_char_boundary(cut)).step_by(7) {
        assert!(Tokenizer::from_bytes(&whole.as_bytes()[..cut]).is_err(), "cut at {cut}");
    }
    // The library would panic: it asserts that a decoder is not nested too deep.
    let deep = format!("{{\"decoder\": {}{}}}", "[".repeat(200), "]".repeat(200));
    assert!(Tokenizer::from_bytes(deep.as_bytes()).is_err());
    let absent = Tokenizer::open(&ModelFiles::embedded("m", &[("tokenizer.model", b"")]));
    assert!(absent.unwrap_err().to_string().contains("save_pretrained"));
}

#[test]
fn tokens_are_spelt_as_bytes() {
    let t = byte_level();
    let bytes = |token: &str| t.bytes_of(t.id_of(token).unwrap()).unwrap();
    assert_eq!(bytes("Ġth"), b" th");
    assert_eq!(bytes("ðŁ"), [0xF0, 0x9F]);
    assert_eq!(bytes("two words"), b"two words", "added tokens are spelt as they are");
    assert_eq!(t.bytes_of(9999), None);
    let t = byte_fallback();
    assert_eq!(t.bytes_of(t.id_of("▁the").unwrap()).unwrap(), b" the");
    assert_eq!(t.bytes_of(t.id_of("<0xE2>").unwrap()).unwrap(), [0xE2]);
}

/// What is no character costs the thousandth token no more than the tenth.
#[test]
fn a_run_of_half_characters_stays_short() {
    let t = byte_level();
    let half = t.id_of("Ģ").unwrap(); // 0x80
    let (first, second) = (t.id_of("ð").unwrap(), t.id_of("Ł").unwrap());
    for run in [vec![half], vec![first, second], vec![first], vec![half, half, first]] {
        let ids: Vec<u32> = run.iter().copied().cycle().take(1000).collect();
        let mut stream = t.stream(true);
        let mut text = String::new();
        for &id in &ids {
            text.push_str(&stream.push(id).unwrap());
            assert!(stream.window.len() <= LONGEST, "{run:?}");
        }
        text.push_str(&stream.flush().unwrap());
        assert_eq!(text, t.decode(&ids, true).unwrap(), "{run:?}");
    }
}

/// With a normal form, and with an added token that takes white space along.
fn composing() -> Tokenizer {
    let mut json: Value =
        serde_json::from_str(&byte_level().inner.to_string(false).unwrap()).unwrap();
    json["normalizer"] = json!({"type": "NFC"});
    json["added_tokens"][0]["rstrip"] = true.into();
    build(&json)
}

#[test]
fn what_is_dropped_has_no_least_number() {
    let with = |part: &str, value: Value| {
        let mut json: Value =
            serde_json::from_str(&byte_level().inner.to_string(false).unwrap()).unwrap();
        json[part] = value;
        Least::new(&build(&json).inner).is_some()
    };
    assert!(with("normalizer", json!({"type": "NFKC"})));
    assert!(!with("normalizer", json!({"type": "Strip", "strip_left": true, "strip_right": true})));
    assert!(!with(
        "normalizer",
        json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}]})
    ));
    assert!(!with("pre_tokenizer", json!({"type": "WhitespaceSplit"})));
    assert!(
        !with(
            "model",
            json!({"type": "BPE", "vocab": {"a": 0, "<unk>": 1}, "merges": [],
        "unk_token": "<unk>", "fuse_unk": true})
        ),
        "all that it does not know is one token"
    );
}

#[test]
fn long_texts_are_refused_before_they_are_encoded_and_others_are_not() {
    let t = Tokenizer::open(&crate::demo()).unwrap();
    let digits = "0123456789".repeat(400_000);
    let least = Least::new(&t.inner).unwrap();
    assert!(least.tokens(&digits) >= digits.len() / 2, "no token holds more than a few digits");
    let refused = |text: &str, limit| {
        matches!(t.encode_within(text, true, limit), Err(TokenizerError::TooLong { .. }))
    };
    assert!(refused(&digits, 100_000));
    let words = "Once upon a time there was a little dog. ".repeat(2000);
    let exact = t.encode(&words, true).unwrap();
    assert_eq!(t.encode_within(&words, true, exact.len()).unwrap(), exact);
    assert!(refused(&words, exact.len() / 4));
    // The look at pieces, where nothing is known of the tokenizer.
    let blind = Tokenizer { least: Arc::new(OnceLock::from(None)), ..t.clone() };
    let long = |limit| blind.surely_longer(&words, limit).unwrap();
    assert!(long(exact.len() / 4) && !long(exact.len() / 2 + 10) && !long(exact.len()));
}

fn least_is_least(t: &Tokenizer, text: &str) -> Result<(), TestCaseError> {
    let least = Least::new(&t.inner).expect("it drops nothing");
    let tokens = t.encode(text, false).unwrap().len();
    prop_assert!(least.tokens(text) <= tokens, "{:?} has {}", text, tokens);
    Ok(())
}

fn streams_as_it_decodes(t: &Tokenizer, ids: &[u32], skip: bool) -> Result<(), TestCaseError> {
    let whole = t.decode(ids, skip).unwrap();
    prop_assert_eq!(pieces(&mut t.stream(skip), ids).concat(), whole);
    Ok(())
}

proptest! {
    #[test]
    fn pieces_concatenate_to_the_decoded_text(
        ids in prop::collection::vec(0..266_u32, 0..40), skip: bool,
    ) {
        streams_as_it_decodes(&byte_level(), &ids, skip)?;
        streams_as_it_decodes(&byte_fallback(), &ids, skip)?;
    }

    #[test]
    fn long_runs_stream_as_they_decode(
        ids in prop::collection::vec(
            prop_oneof![100..266_u32, Just(2), Just(6), Just(8 + 0xE2), Just(8 + 0x82)], 30..120,
        ), skip: bool,
    ) {
        streams_as_it_decodes(&byte_level(), &ids, skip)?;
        streams_as_it_decodes(&byte_fallback(), &ids, skip)?;
    }

    #[test]
    fn no_text_has_fewer_tokens_than_the_least(
        text in "([ a-e0-9thé😀▁]|e\\u{301}|\\u{212A}|<\\|end\\|>|two words|  +|<0x41>){0,40}",
    ) {
        for t in [byte_level(), composing(), byte_fallback()] {
            least_is_least(&t, &text)?;
        }
    }

    #[test]
    fn text_streams_without_replacement_characters(text in "[ a-zé😀]{0,20}") {
        let t = byte_level();
        let ids = t.encode(&text, false).unwrap();
        let pieces = pieces(&mut t.stream(true), &ids);
        prop_assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "half a character");
        prop_assert_eq!(pieces.concat(), text);
    }
}
