# Runs blocks of commands in one shell, as a person does: each line on descriptor 9
# names a file; descriptor 8 is told when its commands have ended well.
set -euo pipefail
while IFS= read -r block <&9; do
  source "$block" </dev/null 8>&- 9<&-
  echo "--- end of block"
  echo done >&8
done
