//! Words for a shell to read.

/// A word as a shell takes it back.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// What a shell is given to run `words`: one word is a script, more are a command with its arguments.
pub fn command(words: &[String]) -> String {
    match words {
        [script] => script.clone(),
        words => words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_and_a_lone_one_is_a_script() {
        assert_eq!(quote("a=b"), "a=b");
        assert_eq!(quote("it's"), "'it'\\''s'");
        assert_eq!(quote(""), "''");
        assert_eq!(command(&["ls; true".to_owned()]), "ls; true");
        assert_eq!(command(&["ls".to_owned(), "a b".to_owned()]), "ls 'a b'");
    }
}
