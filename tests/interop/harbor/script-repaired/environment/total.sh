total=0
while read -r n; do total=$((total - n)); done < numbers.txt
echo "$total"
