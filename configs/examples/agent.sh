# An agent in bash: it asks the model what the task says, and reports as its reward how many of the answer's letters are vowels.
set -eu
post() {
  curl -sS --fail "$1" -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d "$2"
}
prompt=$(sed -E 's/.*"prompt": ("[^"]*").*/\1/' "$TRIVET_TASK_FILE")
asked="{\"model\": \"$TRIVET_MODEL\", \"messages\": [{\"role\": \"user\", \"content\": $prompt}]}"
said=$(post "$OPENAI_BASE_URL/chat/completions" "$asked" | sed -E 's/.*"content": "([^"]*)".*/\1/')
vowels=$(printf %s "$said" | tr -cd aeiou | wc -c)
post "$TRIVET_REWARD_URL" "{\"reward\": $((10 * vowels / (${#said} + 1)))}"
