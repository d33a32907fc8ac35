"""Keep the patch series in shape: lint it, import into it, export it, rebase it onto a release."""
