//! End-to-end tests: fixtures, filetests, mutations.
